// Linear layers: x W^T + b. W is packed in panels of PANEL outputs, and in a panel input by input, so that all that one
// number of x is multiplied by lies side by side; bfloat16 in pairs of inputs, a pair being a word. Twin: torch's linear.
// A row has the same bits with any number of others and on any threads: an output adds up RUN of its inputs one after
// the other, and then those sums, whatever is computed beside it.
#include "simd.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using namespace aserve;

struct Layer {
    const uint32_t* weights;  // packed
    const void* bias;         // or null
    int64_t inputs, outputs;
};

namespace {

// Registers as wide as the processor's. The sums of a tile, ROWS x VECTORS of them, stay in registers.
#if defined(__AVX512F__)
constexpr int64_t REGISTER_BYTES = 64, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int64_t REGISTER_BYTES = 32, VECTORS = 2;
#else
constexpr int64_t REGISTER_BYTES = 16, VECTORS = 4;
#endif
constexpr int64_t WIDTH = REGISTER_BYTES / 4, PANEL = VECTORS * WIDTH, ROWS = 6;
constexpr int64_t RUN = 128;       // inputs: their weights for a panel stay in the first cache, from tile to tile
constexpr int64_t ROW_BLOCK = 96;  // rows that are computed before the next panels
constexpr int64_t GROUP = 4;       // panels that a block of rows is made ready for
constexpr int64_t CHUNK = 2;       // steps from one fetching of weights ahead to the next
constexpr int64_t LINE = 64, CHUNK_LINES = CHUNK * PANEL * 4 / LINE;
constexpr int64_t MANY_ROWS = 16;            // for fewer, panels are dealt one by one
constexpr int64_t PARALLEL_FLOPS = 1 << 16;  // what is worth a second thread

typedef float vector __attribute__((vector_size(REGISTER_BYTES), may_alias));
typedef uint32_t words __attribute__((vector_size(REGISTER_BYTES), may_alias));

template <typename V>
inline V load_as(const uint32_t* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// How a step, the inputs of one word of a weight, is multiplied. T: what numbers are kept as. X: what those of x are
// spread as, X_PER_STEP for a step, the rows of a tile RUN apart.
struct Floats {
    typedef float T;
    typedef float X;
    static constexpr int64_t INPUTS_PER_STEP = 1, X_PER_STEP = 1;

    template <int COUNT>
    static void add(vector (*sums)[VECTORS], const vector* weights, const float* x) {
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * RUN];
    }

    template <int COUNT>
    static void step(vector (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vector weights[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = load_as<vector>(step_weights + v * WIDTH);
        add<COUNT>(sums, weights, x);
    }
};

// bfloat16 as float, exactly. Intel's processors take half the time for this that their own instruction for it takes.
struct Widened {
    typedef bf16 T;
    typedef float X;
    static constexpr int64_t INPUTS_PER_STEP = 2, X_PER_STEP = 2;

    template <int COUNT>
    static void step(vector (*sums)[VECTORS], const uint32_t* step_weights, const float* x) {
        vector weights[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = (vector)(load_as<words>(step_weights + v * WIDTH) << 16);
        Floats::add<COUNT>(sums, weights, x);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = (vector)(load_as<words>(step_weights + v * WIDTH) & 0xffff0000);
        Floats::add<COUNT>(sums, weights, x + 1);
    }
};

#ifdef __AVX512BF16__
// bfloat16 by the processor's own instruction, which takes what is smaller than 2^-126 for 0.
struct Dots {
    typedef bf16 T;
    typedef uint32_t X;
    static constexpr int64_t INPUTS_PER_STEP = 2, X_PER_STEP = 1;

    template <int COUNT>
    static void step(vector (*sums)[VECTORS], const uint32_t* step_weights, const uint32_t* x) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const __m512bh weights = load_as<__m512bh>(step_weights + v * WIDTH);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; r++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights, (__m512bh)_mm512_set1_epi32(x[r * RUN]));
        }
    }
};
#endif

// A row's n numbers; where they end within a step, 0 completes it.
inline void spread(const float* x, float* out, int64_t n) { memcpy(out, x, n * sizeof(float)); }

inline void spread(const bf16* x, float* out, int64_t n) {
    in_pieces(n, [&](int64_t i, int64_t count) { store_piece(out + i, load_piece(x + i, count), count); });
    if (n % 2) out[n] = 0;
}

inline void spread(const bf16* x, uint32_t* out, int64_t n) {
    if (n % 2) out[n / 2] = 0;
    memcpy(out, x, n * sizeof(bf16));
}

// Adds the products of a tile's COUNT rows with a run of weights to their totals. Meanwhile some lines of the weights
// that come next are fetched, so that memory is never idle.
template <typename Steps, int COUNT>
void add_run(
    const uint32_t* weights, const typename Steps::X* x, int64_t steps, float* totals, const char* ahead, int64_t lines) {
    vector sums[COUNT][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = vector{};
    for (int64_t begin = 0; begin < steps; begin += CHUNK) {
        for (int64_t i = 0; i < lines; i++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        for (int64_t s = begin; s < begin + CHUNK && s < steps; s++)
            Steps::template step<COUNT>(sums, weights + s * PANEL, x + s * Steps::X_PER_STEP);
    }
    vector* total = (vector*)totals;
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *total++ += sums[r][v];
}

// The first of part i of `whole`, in so many parts of about the same size.
inline int64_t part(int64_t whole, int64_t parts, int64_t i) { return whole * i / parts; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t panel_words(const Layer* layer, int64_t inputs_per_step) {
    return ceil_div(layer->inputs, inputs_per_step) * PANEL;
}

template <typename T>
void store_totals(const Layer* layer, const float* totals, T* out, int64_t rows, int64_t panel) {
    const int64_t first = panel * PANEL, count = layer->outputs - first < PANEL ? layer->outputs - first : PANEL;
    const T* bias = (const T*)layer->bias;
    for (int64_t r = 0; r < rows; r++)
        in_pieces(count, [&](int64_t i, int64_t n) {
            vf total = load_piece(totals + r * PANEL + i, n);
            if (bias) total += load_piece(bias + first + i, n);
            store_piece(out + r * layer->outputs + first + i, total, n);
        });
}

// A block of rows by the panels from `first` up to `end`. next: the weights that this thread takes then.
template <typename Steps>
void multiply(
    const Layer* layer, const typename Steps::T* x, int64_t x_stride, typename Steps::T* out, int64_t rows,
    int64_t first, int64_t end, const uint32_t* next) {
    typedef typename Steps::X X;
    static constexpr void (*add[])(const uint32_t*, const X*, int64_t, float*, const char*, int64_t) = {
        nullptr,           add_run<Steps, 1>, add_run<Steps, 2>, add_run<Steps, 3>,
        add_run<Steps, 4>, add_run<Steps, 5>, add_run<Steps, 6>};
    alignas(64) X spreaded[ROW_BLOCK * RUN];
    alignas(64) float totals[GROUP][ROW_BLOCK * PANEL];
    const int64_t words = panel_words(layer, Steps::INPUTS_PER_STEP), run_words = RUN / Steps::INPUTS_PER_STEP * PANEL;
    const int64_t tiles = ceil_div(rows, ROWS), lines = ceil_div(CHUNK_LINES, tiles);
    for (int64_t p = 0; p < end - first; p++) memset(totals[p], 0, rows * PANEL * sizeof(float));
    const uint32_t* weights = layer->weights + first * words;
    for (int64_t begin = 0; begin < layer->inputs; begin += RUN, weights += run_words) {
        const int64_t n = layer->inputs - begin < RUN ? layer->inputs - begin : RUN;
        const int64_t steps = ceil_div(n, Steps::INPUTS_PER_STEP), tile_lines = lines * ceil_div(steps, CHUNK);
        const uint32_t* after = begin + RUN < layer->inputs ? weights + run_words : next;
        for (int64_t r = 0; r < rows; r++) spread(x + r * x_stride + begin, spreaded + r * RUN, n);
        for (int64_t p = 0; p < end - first; p++) {
            const char* ahead = (const char*)(p + 1 < end - first ? weights + (p + 1) * words : after);
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t row = part(rows, tiles, t), count = part(rows, tiles, t + 1) - row;
                add[count](
                    weights + p * words, spreaded + row * RUN, steps, totals[p] + row * PANEL,
                    ahead + t * tile_lines * LINE, lines);
            }
        }
    }
    for (int64_t p = 0; p < end - first; p++) store_totals(layer, totals[p], out, rows, first + p);
}

// Blocks of rows times groups of panels, each for the thread that is free first. A thread knows its next in advance.
template <typename Steps>
void product(
    const Layer* layer, const typename Steps::T* x, int64_t x_stride, typename Steps::T* out, int64_t rows) {
    const int64_t panels = ceil_div(layer->outputs, PANEL), words = panel_words(layer, Steps::INPUTS_PER_STEP);
    const int64_t groups = ceil_div(panels, rows < MANY_ROWS ? 1 : GROUP), blocks = ceil_div(rows, ROW_BLOCK);
    const int64_t tasks = groups * blocks;
    int64_t taken = 0;
#pragma omp parallel if (rows * layer->outputs * layer->inputs > PARALLEL_FLOPS)
    {
        auto take = [&] { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); };
        for (int64_t task = take(), next; task < tasks; task = next) {
            next = take();
            const int64_t group = task / blocks, next_group = (next < tasks ? next : task) / blocks;
            const int64_t begin = part(rows, blocks, task % blocks), end = part(rows, blocks, task % blocks + 1);
            multiply<Steps>(
                layer, x + begin * x_stride, x_stride, out + begin * layer->outputs, end - begin,
                part(panels, groups, group), part(panels, groups, group + 1),
                layer->weights + part(panels, groups, next_group) * words);
        }
    }
}

// A line of each row of the weight at a time, so that what is read and what is written is in the cache.
template <typename T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
    constexpr int64_t PER_WORD = 4 / sizeof(T), PER_LINE = LINE / sizeof(T);
    const int64_t padded = ceil_div(inputs, PER_WORD) * PER_WORD;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < ceil_div(outputs, PANEL); panel++) {
        const T* from = weight + panel * PANEL * inputs;
        T* to = packed + panel * PANEL * padded;
        const int64_t count = outputs - panel * PANEL < PANEL ? outputs - panel * PANEL : PANEL;
        if (count < PANEL || padded > inputs) memset(to, 0, PANEL * padded * sizeof(T));
        for (int64_t begin = 0; begin < inputs; begin += PER_LINE)
            for (int64_t o = 0; o < count; o++)
                for (int64_t i = begin; i < begin + PER_LINE && i < inputs; i++)
                    to[(i / PER_WORD * PANEL + o) * PER_WORD + i % PER_WORD] = from[o * inputs + i];
    }
}

// Rows of W, as they were before it was packed. An id that is no row gives what is not a number.
template <typename T>
void unpack_rows(const Layer* layer, const int64_t* ids, T* out, int64_t count) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
    const int64_t inputs = layer->inputs, words = panel_words(layer, PER_WORD);
#pragma omp parallel for schedule(static) if (count * inputs > GRAIN)
    for (int64_t t = 0; t < count; t++) {
        T* to = out + t * inputs;
        if (ids[t] < 0 || ids[t] >= layer->outputs) {
            memset(to, 0xff, inputs * sizeof(T));
            continue;
        }
        const uint32_t* from = layer->weights + ids[t] / PANEL * words + ids[t] % PANEL;
        for (int64_t i = 0; i < inputs; i += PER_WORD, from += PANEL)
            memcpy(to + i, from, (inputs - i < PER_WORD ? inputs - i : PER_WORD) * sizeof(T));
    }
}

}  // namespace

#define KERNELS(T, Steps, name)                                                                                       \
    void pack_##name(const T* weight, T* packed, int64_t outputs, int64_t inputs) {                                   \
        pack(weight, packed, outputs, inputs);                                                                        \
    }                                                                                                                 \
    void unpack_rows_##name(const Layer* layer, const int64_t* ids, T* out, int64_t count) {                          \
        unpack_rows(layer, ids, out, count);                                                                          \
    }                                                                                                                 \
    void product_##name(const Layer* layer, const T* x, int64_t x_stride, T* out, int64_t rows) {                     \
        product<Steps>(layer, x, x_stride, out, rows);                                                                \
    }

extern "C" {
KERNELS(float, Floats, f32)
KERNELS(bf16, Widened, bf16)

void product_dots_bf16(const Layer* layer, const bf16* x, int64_t x_stride, bf16* out, int64_t rows) {
#ifdef __AVX512BF16__
    product<Dots>(layer, x, x_stride, out, rows);
#else
    product<Widened>(layer, x, x_stride, out, rows);
#endif
}

// How many outputs a packed weight's are rounded up to a multiple of.
void panel_outputs(int64_t* outputs) { *outputs = PANEL; }
}
