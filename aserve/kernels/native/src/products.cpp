// Linear layers in the model's type: products.h, with bfloat16 in pairs of inputs, a pair being a word. Twin: torch's
// linear.
#include "products.h"

using namespace aserve;

namespace {

template <typename T> struct PlainRows { const T* numbers; int64_t stride, rows, inputs; };

// What floats and bfloat16 have in common: sums of float, which are added to the totals as they are.
struct Unscaled : ByVectors {
    typedef vf Sum;
    typedef float X;
    struct Extra {};
    static constexpr int64_t RUN = 128, SCALE_WORDS = 0;

    template <typename Rows> static Extra extra(const Rows&, int64_t, int64_t) { return {}; }
    // Where inputs end within a step, 0 completes it.
    template <typename Rows> static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, float* out) {
        convert(x.numbers + row * x.stride + begin, n, out);
        if (n % 2) out[n] = 0;
    }
    static Sum start(Extra, int) { return vf{}; }
    static vf fold(vf total, Sum sum, Extra, int, const uint32_t*) { return total + sum; }
};

struct Floats : Unscaled {
    typedef PlainRows<float> Rows;
    static constexpr int64_t INPUTS_PER_STEP = 1, X_PER_STEP = 1, X_PER_RUN = RUN;

    template <int COUNT> static void add(vf (*sums)[VECTORS], const vf* weights, const float* x) {
        UNROLL for (int r = 0; r < COUNT; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * X_PER_RUN];
    }

    template <int COUNT> static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vf weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_as<vf>(step_weights + v * LANES);
        add<COUNT>(sums, weights, x);
    }
};

// bfloat16 as float, exactly. Intel's processors take half the time for this that their own instruction for it takes.
struct Widened : Unscaled {
    typedef PlainRows<bf16> Rows;
    static constexpr int64_t INPUTS_PER_STEP = 2, X_PER_STEP = 2, X_PER_RUN = RUN;

    template <int COUNT> static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vf weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = (vf)(load_as<vu>(step_weights + v * LANES) << 16);
        Floats::add<COUNT>(sums, weights, x);
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = (vf)(load_as<vu>(step_weights + v * LANES) & 0xffff0000);
        Floats::add<COUNT>(sums, weights, x + 1);
    }
};

#if defined(__AMX_BF16__)
#define SUMS(move, p) \
    move(0, p, PANEL * 4); move(1, p + 16, PANEL * 4); move(2, p + 32, PANEL * 4); move(3, p + 48, PANEL * 4)

// Eight tiles, each of 16 rows of 64 bytes.
const struct { uint8_t palette, more[15]; uint16_t bytes[16]; uint8_t rows[16]; } SHAPES = {
    1, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// bfloat16 by the processor's matrix units, 16 rows by 16 outputs by 32 inputs at once, of which even and odd ones are
// added up apart. They take what is smaller than 2^-126 for 0.
struct Dots : Unscaled {
    typedef PlainRows<bf16> Rows;
    typedef uint32_t X;
    static constexpr int64_t ROWS = 16, ALIGN = 16, ROW_BLOCK = 256, GROUP = 8, CHUNK = 16, PAIRED = 0;
    static constexpr int64_t RUN = 256, INPUTS_PER_STEP = 2, X_PER_RUN = RUN / 2;

    struct Unit {
        Unit() { _tile_loadconfig(&SHAPES); }
        ~Unit() { _tile_release(); }
    };

    // Where a tile's rows lie as they came, if it is full: they are read there.
    struct Extra { const bf16* numbers; int64_t stride; };

    static bool is_full(const Rows& x, int64_t row, int64_t n) {
        return row < x.rows / ROWS * ROWS && n % (CHUNK * INPUTS_PER_STEP) == 0;
    }

    static Extra extra(const Rows& x, int64_t row, int64_t run) {
        const int64_t begin = run * RUN;
        return {is_full(x, row, at_most(RUN, x.inputs - begin)) ? x.numbers + row * x.stride + begin : nullptr, x.stride};
    }

    static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, uint32_t* out) {
        if (is_full(x, row, n)) return;
        memset(out + n / 2, 0, (rounded_up(n, CHUNK * INPUTS_PER_STEP) - n / 2 * 2) * sizeof(bf16));
        memcpy(out, x.numbers + row * x.stride + begin, n * sizeof(bf16));
    }

    // Rows behind the last are computed, too, of whatever lies there, and read by nobody.
    template <typename Steps>
    static void tile(int64_t, int64_t, const uint32_t* weights, const uint32_t* x, Extra as_it_came, int64_t steps,
        float* totals, const char* ahead, int64_t lines) {
        alignas(64) uint32_t rest[CHUNK * PANEL];
        const int64_t stride = as_it_came.numbers ? as_it_came.stride * sizeof(bf16) : X_PER_RUN * sizeof(X);
        if (as_it_came.numbers) x = (const uint32_t*)as_it_came.numbers;
        write_to_memory();
        SUMS(_tile_loadd, totals);
        for (int64_t s = 0; s < steps; s += CHUNK, weights += CHUNK * PANEL) {
            if (steps - s < CHUNK) {
                memset(rest, 0, sizeof rest);
                weights = (const uint32_t*)memcpy(rest, weights, (steps - s) * PANEL * 4);
                write_to_memory();
            }
            for (int64_t i = 0; i < lines; i++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
            _tile_loadd(4, x + s, stride);
            _tile_loadd(5, weights, PANEL * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, weights + 16, PANEL * 4);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, weights + 32, PANEL * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, weights + 48, PANEL * 4);
            _tile_dpbf16ps(3, 4, 5);
        }
        SUMS(_tile_stored, totals);
    }

    // The compiler does not know what tiles read.
    static void write_to_memory() { __asm__ volatile("" ::: "memory"); }
};
#elif defined(__AVX512BF16__)
// bfloat16 by the processor's own instruction, which takes what is smaller than 2^-126 for 0. Its runs have as many words
// as those of floats.
struct Dots : Unscaled {
    typedef PlainRows<bf16> Rows;
    typedef uint32_t X;
    static constexpr int64_t RUN = 256, INPUTS_PER_STEP = 2, X_PER_STEP = 1, X_PER_RUN = RUN / 2;

    template <int COUNT> static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const uint32_t* x) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const __m512bh weights = load_as<__m512bh>(step_weights + v * LANES);
            UNROLL for (int r = 0; r < COUNT; r++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights, (__m512bh)_mm512_set1_epi32(x[r * X_PER_RUN]));
        }
    }

    static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, uint32_t* out) {
        if (n % 2) out[n / 2] = 0;
        memcpy(out, x.numbers + row * x.stride + begin, n * sizeof(bf16));
    }
};
#else
typedef Widened Dots;
#endif

template <typename Steps, typename T>
void product(const Layer* layer, const T* x, int64_t x_stride, T* out, int64_t rows) {
    int64_t taken = 0;
#pragma omp parallel if (rows * layer->outputs * layer->inputs > PARALLEL_FLOPS)
    work<Steps>(layer, {x, x_stride, rows, layer->inputs}, out, rows, &taken);
}

// A line of each row of the weight at a time, so that what is read and what is written is in the cache.
template <typename T> void pack(const T* weight, uint32_t* packed, int64_t outputs, int64_t inputs) {
    constexpr int64_t PER_WORD = 4 / sizeof(T), PER_LINE = LINE / 4;
    const int64_t whole = inputs / PER_WORD, words = ceil_div(inputs, PER_WORD);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < ceil_div(outputs, PANEL); panel++) {
        const T* from = weight + panel * PANEL * inputs;
        uint32_t* to = packed + panel * PANEL * words;
        const int64_t count = at_most(PANEL, outputs - panel * PANEL);
        if (count < PANEL || words > whole) memset(to, 0, PANEL * words * 4);
        for (int64_t begin = 0; begin < words; begin += PER_LINE) {
            const int64_t end = at_most(begin + PER_LINE, whole);
            for (int64_t o = 0; o < count; o++)
                for (int64_t i = begin; i < end; i++)
                    memcpy(to + i * PANEL + o, from + o * inputs + i * PER_WORD, 4);
        }
        if (words > whole)
            for (int64_t o = 0; o < count; o++)
                memcpy(to + whole * PANEL + o, from + o * inputs + whole * PER_WORD, sizeof(T));
    }
}

// Rows of W, as they were before it was packed. An id that is no row gives what is not a number.
template <typename T> void unpack_rows(const Layer* layer, const int64_t* ids, T* out, int64_t count) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
    const int64_t inputs = layer->inputs, words = ceil_div(inputs, PER_WORD) * PANEL;
#pragma omp parallel for schedule(static) if (count * inputs > GRAIN)
    for (int64_t t = 0; t < count; t++) {
        T* to = out + t * inputs;
        if (ids[t] < 0 || ids[t] >= layer->outputs) {
            memset(to, 0xff, inputs * sizeof(T));
            continue;
        }
        const uint32_t* from = layer->weights + ids[t] / PANEL * words + ids[t] % PANEL;
        for (int64_t i = 0; i < inputs; i += PER_WORD, from += PANEL)
            memcpy(to + i, from, at_most(PER_WORD, inputs - i) * sizeof(T));
    }
}

}  // namespace

#define KERNELS(T, Steps, name)                                                                                       \
    void pack_##name(const T* from, uint32_t* to, int64_t outputs, int64_t inputs) { pack(from, to, outputs, inputs); }\
    void unpack_rows_##name(const Layer* of, const int64_t* ids, T* out, int64_t n) { unpack_rows(of, ids, out, n); } \
    void product_##name(const Layer* layer, const T* x, int64_t x_stride, T* out, int64_t rows) {                     \
        product<Steps>(layer, x, x_stride, out, rows);                                                                \
    }

extern "C" {
KERNELS(float, Floats, f32)
KERNELS(bf16, Widened, bf16)

void product_dots_bf16(const Layer* layer, const bf16* x, int64_t x_stride, bf16* out, int64_t rows) {
    product<Dots>(layer, x, x_stride, out, rows);
}

// How many outputs a packed weight's are rounded up to a multiple of.
void panel_outputs(int64_t* outputs) { *outputs = PANEL; }
}
