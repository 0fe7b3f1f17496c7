// Linear layers whose weights are int8: products.h. Twin: reference_int8.py, to the bit where a product and a sum in one
// expression are rounded once, as compilers do that may use FMA.
//
// Some inputs share a scale: all of an output's, or 32, or 128 of them one behind the other. Rows are quantized alike, each
// by itself (dynamic quantization; groups as in ggml's Q8_0), so that what is multiplied and added up within a run is
// whole numbers, exactly. A weight is kept as w + 128, for the instruction that multiplies bytes without a sign by such with
// one (AVX512-VNNI); 128 times the sum of x is what sums begin below 0. A run of such products is below 2^24,
// which is to say that a run's sum is a float.
#include "products.h"

using namespace aserve;

namespace {

// Of a row's run: what its numbers are to be multiplied by, and what sums begin with.
struct RunScale { float scale; int32_t start; };

// scales: [runs, rows].
struct QuantizedRows { const uint8_t* numbers; int64_t stride; const RunScale* scales; int64_t rows; };

// A word is four bytes: of weights without a sign, of x with one. An instruction multiplies one of PARTS parts of two words;
// add_products adds these products to a sum.
#if defined(__AVX512VNNI__)
constexpr int64_t PARTS = 1;

inline vu add_products(vu sum, vu weights, vu x) {
    return (vu)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
}
#else
// Pairs of 16 bits: the first and third byte, and the others.
constexpr int64_t PARTS = 2;

inline vu add_products(vu sum, vu weights, vu x) {
#if defined(__AVX512F__)
    sum += (vu)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
    sum += (vu)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#else
    sum += (weights & 0xffff) * (vu)((vi)(x << 16) >> 16) + (weights >> 16) * (vu)((vi)x >> 16);
#endif
#ifdef __AVX2__
    __asm__("" : "+v"(sum));  // now: GCC would keep the products of many steps in memory, to add them up later
#endif
    return sum;
}
#endif

template <int64_t INPUTS> struct Int8 : ByVectors {
    typedef QuantizedRows Rows;
    typedef uint32_t X;
    typedef vu Sum;
    typedef const RunScale* Extra;
    static constexpr int64_t RUN = INPUTS, INPUTS_PER_STEP = 4, SCALE_WORDS = PANEL;
    static constexpr int64_t X_PER_STEP = 1, X_PER_PART = RUN / INPUTS_PER_STEP, X_PER_RUN = PARTS * X_PER_PART;

    template <int COUNT> static void step(vu (*sums)[VECTORS], const uint32_t* step_weights, const uint32_t* x) {
        UNROLL for (int part = 0; part < PARTS; part++, x += X_PER_PART) {
            vu weights[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                weights[v] = load_as<vu>(step_weights + v * LANES) >> 8 * part & (PARTS > 1 ? 0x00ff00ff : ~0u);
            UNROLL for (int r = 0; r < COUNT; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = add_products(sums[r][v], weights[v], vu{} + x[r * X_PER_RUN]);
        }
    }

    static void spread(const Rows& x, int64_t row, int64_t begin, int64_t n, uint32_t* out) {
        const uint8_t* from = x.numbers + row * x.stride + begin;
        if (PARTS == 1) memcpy(out, from, rounded_up(n, INPUTS_PER_STEP));
        else for (int64_t i = 0; i < rounded_up(n, INPUTS_PER_STEP); i += 2) {
            const uint16_t pair = load_as<uint16_t>(from + i), first = pair << 8;
            store_as((uint8_t*)out + i, (int16_t)((int16_t)first >> 8));
            store_as((uint8_t*)(out + X_PER_PART) + i, (int16_t)((int16_t)pair >> 8));
        }
    }

    static Extra extra(const Rows& x, int64_t row, int64_t run) { return x.scales + run * x.rows + row; }
    static Sum start(Extra rows, int r) { return vu{} + (uint32_t)rows[r].start; }
    static vf fold(vf total, Sum sum, Extra rows, int r, const uint32_t* scales) {
        return total + __builtin_convertvector((vi)sum, vf) * (load_as<vf>(scales) * rows[r].scale);
    }
};

// ---- quantizing

// Numbers from -127 to 127 times the scale. factor: about 1 / scale.
struct Grid { float scale, factor; };

// The grid for n numbers. What is not a number makes the scale none: as bits it is larger than any.
template <typename T> Grid grid_of(const T* x, int64_t n) {
    vi tops{};
    in_pieces(n, [&](int64_t i, int64_t count) {
        const vi bits = (vi)load_piece(x + i, count) & 0x7fffffff, larger = bits > tops;
        tops = (bits & larger) | (tops & ~larger);
    });
    const int32_t top = max(tops);
    const float largest = load_as<float>(&top);
    return {largest / 127.0f, largest > 1e-30f ? 127.0f / largest : 0.0f};
}

// To the nearest whole number, halves to even, as the low bits of a sum; the others wrap around.
inline vu quantized(vf x, float factor) {
    const float magic = 12582912.0f;  // 1.5 * 2^23
    return (vu)(x * factor + magic) - (vu)splat(magic);
}

// out: a multiple of LANES; what x does not fill is 0. scales: one of each run, `stride` apart.
template <int64_t RUN, typename T>
void quantize_row(const T* x, int64_t inputs, int64_t group, uint8_t* out, RunScale* scales, int64_t stride) {
    Grid grid{};
    for (int64_t begin = 0; begin < inputs; begin += RUN, scales += stride) {
        if (begin % group == 0) grid = grid_of(x + begin, at_most(group, inputs - begin));
        vu sums{};
        in_pieces(at_most(RUN, inputs - begin), [&](int64_t i, int64_t count) {
            const vu numbers = quantized(load_piece(x + begin + i, count), grid.factor);
            sums += numbers;
            store_as(out + begin + i, low_bytes(numbers));
        });
        *scales = {grid.scale, (int32_t)(sum(sums) * -128)};
    }
}

inline int64_t group_of(const Layer* layer) { return layer->group ? layer->group : layer->inputs; }

inline int64_t row_stride(const Layer* layer) { return rounded_up(layer->inputs, LANES); }

template <typename Steps, typename T> void pack(const Layer* layer, const T* weight, uint32_t* packed) {
    const int64_t inputs = layer->inputs, group = group_of(layer), panels = ceil_div(layer->outputs, PANEL);
    const int64_t all_words = panel_words<Steps>(inputs);
    if (layer->outputs % PANEL) memset(packed + (panels - 1) * all_words, 0, all_words * 4);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        Grid grids[PANEL];
        uint32_t* to = packed + panel * all_words;
        for (int64_t begin = 0; begin < inputs; begin += Steps::RUN) {
            const int64_t n = at_most(Steps::RUN, inputs - begin), end = run_words<Steps>(n) - PANEL;
            for (int64_t o = 0; o < at_most(PANEL, layer->outputs - panel * PANEL); o++) {
                const T* from = weight + (panel * PANEL + o) * inputs + begin;
                if (begin % group == 0) grids[o] = grid_of(from, at_most(group, inputs - begin));
                in_pieces(n, [&](int64_t i, int64_t count) {
                    uint8_t numbers[LANES];
                    store_as(numbers, low_bytes(quantized(load_piece(from + i, count), grids[o].factor) + 128));
                    for (int64_t k = 0; k < count; k += 4) memcpy(to + (i + k) / 4 * PANEL + o, numbers + k, 4);
                });
                memcpy(to + end + o, &grids[o].scale, sizeof(float));
            }
            to += end + PANEL;
        }
    }
}

template <typename Steps, typename T>
void product(const Layer* layer, const T* x, int64_t x_stride, T* out, int64_t rows, uint8_t* scratch) {
    const int64_t stride = row_stride(layer);
    RunScale* scales = (RunScale*)(scratch + rows * stride);
    int64_t taken = 0;
#pragma omp parallel if (rows * layer->outputs * layer->inputs > PARALLEL_FLOPS)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t++)
            quantize_row<Steps::RUN>(
                x + t * x_stride, layer->inputs, group_of(layer), scratch + t * stride, scales + t, rows);
        work<Steps>(layer, QuantizedRows{scratch, stride, scales, rows}, out, rows, &taken);
    }
}

// function(Steps{}) for the layer's groups.
template <typename Function> void by_group(const Layer* layer, Function function) {
    layer->group == 32 ? function(Int8<32>{}) : function(Int8<128>{});
}

}  // namespace

#define KERNELS(T, name)                                                                                              \
    void pack_int8_##name(const Layer* layer, const T* weight, uint32_t* packed) {                                    \
        by_group(layer, [&](auto steps) { pack<decltype(steps)>(layer, weight, packed); });                           \
    }                                                                                                                 \
    void product_int8_##name(                                                                                         \
        const Layer* layer, const T* x, int64_t x_stride, T* out, int64_t rows, uint8_t* scratch) {                   \
        by_group(layer, [&](auto steps) { product<decltype(steps)>(layer, x, x_stride, out, rows, scratch); });       \
    }

extern "C" {
KERNELS(float, f32)
KERNELS(bf16, bf16)

// What a packed layer takes, in words, and each row of a product, in bytes of scratch.
void int8_sizes(const Layer* layer, int64_t* packed, int64_t* scratch) {
    by_group(layer, [&](auto steps) {
        typedef decltype(steps) Steps;
        *packed = ceil_div(layer->outputs, PANEL) * panel_words<Steps>(layer->inputs);
        *scratch = row_stride(layer) + ceil_div(layer->inputs, Steps::RUN) * sizeof(RunScale);
    });
}
}
