// Products of a few rows by a matrix that is in the cache, or is about to be: attention's scores and values, adapters.
// A sum takes its products in order, whatever is computed beside it.
#pragma once
#include "simd.h"

namespace aserve {

// What a processor has registers for: rows, and vectors of each of five rows or more, or of four.
constexpr int MAX_PRODUCT_ROWS = LANES == 16 ? 8 : 4;
constexpr int VECTORS_OF_ROWS = LANES == 4 ? 4 : 2, VECTORS_OF_FEW_ROWS = LANES == 8 ? 2 : 4;

// How an X of the first factor, which is so many of its numbers, is multiplied by a vector of the second and added to a
// total; spread: a row of the first as X.
struct Floats {
    typedef float X;
    static constexpr int64_t IN_X = 1;

    template <typename T> static void spread(const T* row, int64_t width, X* out) { convert(row, width, out); }
    static vf add(vf total, X x, vf columns) { return total + x * columns; }
};

#ifdef __AVX512BF16__
// Words of two bfloat16, whose products are exact, by the processor's own instruction.
struct Dots {
    typedef uint32_t X;
    static constexpr int64_t IN_X = 2;

    static void spread(const bf16* row, int64_t width, X* out) {
        if (width % 2) out[width / 2] = 0;
        memcpy(out, row, width * sizeof *row);
    }
    static vf add(vf total, X x, vf columns) {
        return _mm512_dpbf16_ps(total, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(x));
    }
};
#else
typedef Floats Dots;
#endif

// What a product may have for its second factor: N vectors of columns of row d, from column c on.
template <typename T> struct Lines {
    const T* numbers;
    int64_t stride;
    static constexpr int VECTORS = 1;

    template <int N> void columns(int64_t d, int64_t c, vf* x) const {
        UNROLL for (int n = 0; n < N; n++) x[n] = load(numbers + d * stride + c + n * LANES);
    }
};

// out[r][c] (+)= sum over d of a[r][d] b[d][c], for R rows and N vectors of columns; d in order.
template <int R, int N, typename Numbers, typename Factor>
inline void multiply_block(const typename Numbers::X* a, int64_t a_stride, const Factor& b, int64_t c, float* out,
    int64_t out_stride, int64_t depth, bool add) {
    vf total[R][N];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++) total[r][n] = add ? load(out + r * out_stride + c + n * LANES) : vf{};
    for (int64_t d = 0; d < depth; d++) {
        vf columns[N];
        b.template columns<N>(d, c, columns);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int n = 0; n < N; n++) total[r][n] = Numbers::add(total[r][n], a[r * a_stride + d], columns[n]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < N; n++) store(out + r * out_stride + c + n * LANES, total[r][n]);
}

// As multiply, for R rows or fewer.
template <int R, typename Numbers, typename Factor>
__attribute__((noinline)) void multiply_rows(int64_t rows, const typename Numbers::X* a, int64_t a_stride,
    const Factor& b, float* out, int64_t out_stride, int64_t depth, int64_t width, bool add) {
    if constexpr (R > 1)
        if (rows < R)
            return multiply_rows<R - 1, Numbers>(rows, a, a_stride, b, out, out_stride, depth, width, add);
    constexpr int N = R > 4 || R == MAX_PRODUCT_ROWS ? VECTORS_OF_ROWS : VECTORS_OF_FEW_ROWS, LEAST = Factor::VECTORS;
    int64_t c = 0;
    for (; c + N * LANES <= width; c += N * LANES)
        multiply_block<R, N, Numbers>(a, a_stride, b, c, out, out_stride, depth, add);
    for (; c < width; c += LEAST * LANES)
        multiply_block<R, LEAST, Numbers>(a, a_stride, b, c, out, out_stride, depth, add);
}

// out[r][c] (+)= sum over d of a[r][d] b[d][c]; width: how many columns, a multiple of LANES.
template <typename Numbers, typename Factor>
inline void multiply(int64_t rows, const typename Numbers::X* a, int64_t a_stride, const Factor& b, float* out,
    int64_t out_stride, int64_t depth, int64_t width, bool add) {
    in_pieces<MAX_PRODUCT_ROWS>(rows, [&](int64_t r, int64_t n) {
        multiply_rows<MAX_PRODUCT_ROWS, Numbers>(
            n, a + r * a_stride, a_stride, b, out + r * out_stride, out_stride, depth, width, add);
    });
}

}  // namespace aserve
