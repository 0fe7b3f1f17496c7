// Linear layers in the model's type: products.h, with bfloat16 in pairs of inputs, a pair being a word. Twin: torch's
// linear.
#include "products.h"

using namespace aserve;

namespace {

template <typename T>
struct PlainRows {
    const T* numbers;
    int64_t stride;
};

struct NoScales {};

// What floats and bfloat16 have in common: sums of float, which are added to the totals as they are.
struct Unscaled {
    typedef vf Sum;
    typedef NoScales Scales;
    static constexpr int64_t RUN = 128, SCALE_WORDS = 0;

    template <typename Rows>
    static Scales scales(const Rows&, int64_t, int64_t) { return {}; }
    static Sum start(Scales, int) { return vf{}; }
    static vf fold(vf total, Sum sum, Scales, int, const uint32_t*) { return total + sum; }
};

struct Floats : Unscaled {
    typedef PlainRows<float> Rows;
    typedef float X;
    static constexpr int64_t INPUTS_PER_STEP = 1, X_PER_STEP = 1, X_PER_RUN = RUN;

    template <int COUNT>
    static void add(vf (*sums)[VECTORS], const vf* weights, const float* x) {
        UNROLL for (int r = 0; r < COUNT; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * X_PER_RUN];
    }

    template <int COUNT>
    static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vf weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_as<vf>(step_weights + v * LANES);
        add<COUNT>(sums, weights, x);
    }

    static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, float* out) {
        memcpy(out, x.numbers + row * x.stride + begin, n * sizeof(float));
    }
};

// bfloat16 as float, exactly. Intel's processors take half the time for this that their own instruction for it takes.
// Where inputs end within a step, 0 completes it.
struct Widened : Unscaled {
    typedef PlainRows<bf16> Rows;
    typedef float X;
    static constexpr int64_t INPUTS_PER_STEP = 2, X_PER_STEP = 2, X_PER_RUN = RUN;

    template <int COUNT>
    static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vf weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = (vf)(load_as<vu>(step_weights + v * LANES) << 16);
        Floats::add<COUNT>(sums, weights, x);
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = (vf)(load_as<vu>(step_weights + v * LANES) & 0xffff0000);
        Floats::add<COUNT>(sums, weights, x + 1);
    }

    static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, float* out) {
        widen(x.numbers + row * x.stride + begin, n, out);
        if (n % 2) out[n] = 0;
    }
};

#ifdef __AVX512BF16__
// bfloat16 by the processor's own instruction, which takes what is smaller than 2^-126 for 0. Its runs have as many words
// as those of floats.
struct Dots : Unscaled {
    typedef PlainRows<bf16> Rows;
    typedef uint32_t X;
    static constexpr int64_t RUN = 256, INPUTS_PER_STEP = 2, X_PER_STEP = 1, X_PER_RUN = RUN / 2;

    template <int COUNT>
    static void step(vf (*sums)[VECTORS], const uint32_t* step_weights, const uint32_t* x) {
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
    work<Steps>(layer, typename Steps::Rows{x, x_stride}, out, rows, &taken);
}

// A line of each row of the weight at a time, so that what is read and what is written is in the cache.
template <typename T>
void pack(const T* weight, uint32_t* packed, int64_t outputs, int64_t inputs) {
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
template <typename T>
void unpack_rows(const Layer* layer, const int64_t* ids, T* out, int64_t count) {
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
