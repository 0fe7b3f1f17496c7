// Attention to the paged cache where it lies, for decoding and for prompts alike. Twin: reference.py.
//
// A row is one head of one token. Its keys are taken in tiles of TILE positions, which begin at multiples of TILE: each
// tile yields a maximum, a total of weights and a weighted sum of values, and these are folded into the row's in order
// (online softmax: Milakov and Gimelshein, 2018; tiles on different threads: flash-decoding, Dao et al., 2023). All of
// a row's sums are its own, and take its keys in order: its bits depend neither on what rows are computed with it nor on
// what thread computes which tile. What a row does not see has a weight of 0; what no row of an item sees is not read.
//
// Keys and values are packed, SUB positions at once, for a product that has key positions, or numbers of a head, in the
// lanes of its vectors, and takes several rows for each vector loaded. That is so little, even for a row or two, that
// memory is waited for.
#include <math.h>

#ifdef __AVX512F__
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what GCC's own header leaves undefined on purpose
#endif

#include "simd.h"

using namespace aserve;

// Some layers of a step: its sequences, and how they lie in these layers' caches. Strides count numbers.
struct Attention {
    const int32_t *block_table, *seq_lens, *query_starts;
    int64_t num_seqs, table_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_size, block_stride, slot_stride, head_stride;
    int64_t window;  // 0 for none
    // Written by plan_attention: how many items there are, how many rows their partial results have, and what they cost.
    int64_t num_items, num_partial_rows, cost;
};

// What a thread does at once: some rows of a sequence that share a key head, and some tiles of their context.
struct Item {
    int32_t seq, kv_head, first_row, num_rows, first_tile, end_tile;
    int32_t partial;      // where its partial results go, in rows; -1: it has all tiles, and writes the output
    int32_t num_partials; // of a row's first item, how many partial results are folded into the output; else 0
};

namespace {

constexpr int64_t TILE = 256, SUB = 64, ROWS = 64, MAX_HEAD_DIM = 256;
constexpr int64_t COST_OF_PACKING = 4;   // of a tile, in rows
constexpr int64_t ITEMS_PER_THREAD = 4;  // so that threads end at about the same time

// ---- numbers in a product

// A vector of the processor's own width, for what has to stay in registers.
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
constexpr int MAX_PRODUCT_ROWS = 8, VECTORS_OF_FEW_ROWS = 4, VECTORS_OF_ROWS = 2;
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
constexpr int MAX_PRODUCT_ROWS = 4, VECTORS_OF_FEW_ROWS = 2, VECTORS_OF_ROWS = 2;
#else
constexpr int64_t WIDTH = 4;
constexpr int MAX_PRODUCT_ROWS = 4, VECTORS_OF_FEW_ROWS = 4, VECTORS_OF_ROWS = 4;
#endif
typedef float vn __attribute__((vector_size(WIDTH * 4)));

inline vn load_vn(const float* p) {
    vn v;
    memcpy(&v, p, sizeof v);
    return v;
}

// function(begin, n) over [0, width) in so many at once, and what is left.
template <int64_t STEP, typename Function>
inline void in_steps(int64_t width, Function function) {
    int64_t i = 0;
    for (; i + STEP <= width; i += STEP) function(i, STEP);
    if (i < width) function(i, width - i);
}

// What a lane holds of a product's inputs: a float, or where the processor multiplies them, a pair of bfloat16.
template <typename T>
struct Lane {
    typedef float type;
    static constexpr int64_t NUMBERS = 1;
    static vn multiply_add(vn total, float a, vn b) { return total + a * b; }
    static vf load_row(const T* p, int64_t n) { return load_piece(p, n); }
    static void store_weights(float* p, vf v) { store(p, v); }
    // So many numbers of a head, of NUMBERS positions: a lane for each number.
    static void load_values(const T* first, const T*, int64_t n, float* to) { store(to, load_row(first, n)); }
    static void write(T* to, const float* results, float factor, int64_t n) {
        store_piece(to, load(results) * factor, n);
    }
};

#ifdef __AVX512BF16__
template <>
struct Lane<bf16> {
    typedef int32_t type;
    static constexpr int64_t NUMBERS = 2;
    static vn multiply_add(vn total, int32_t a, vn b) {
        return (vn)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
    }
    static vf load_row(const bf16* p, int64_t n) {
        vf v;
        if (n == 2 * LANES) return memcpy(&v, p, sizeof v), v;
        memset(&v, 0, sizeof v);
        memcpy(&v, p, n * sizeof *p);
        return v;
    }
    static void store_weights(int32_t* p, vf v) {
        __m256bh h = _mm512_cvtneps_pbh((__m512)v);
        memcpy(p, &h, sizeof h);
    }
    // The even numbers of the head, then the odd ones: that is how they are paired without moving them between lanes.
    static void load_values(const bf16* first, const bf16* second, int64_t n, float* to) {
        vu a = (vu)load_row(first, n), b = (vu)load_row(second, n);
        store(to, (vf)((a & 0xffff) | (b << 16)));
        store(to + LANES, (vf)((a >> 16) | (b & 0xffff0000)));
    }
    static void write(bf16* to, const float* results, float factor, int64_t n) {
        vu even = (vu)as_kept(load(results) * factor, to), odd = (vu)as_kept(load(results + LANES) * factor, to);
        vu both = (even >> 16) | odd;
        memcpy(to, &both, n * sizeof *to);
    }
};
#endif

// out[r][c] (+)= sum over d of a[r][d] b[d][c], for R rows and N vectors of columns; d in order.
template <typename T, int R, int N>
inline void multiply_block(
    const typename Lane<T>::type* a, int64_t a_stride, const float* b, int64_t b_stride, float* out, int64_t out_stride,
    int64_t depth, bool add) {
    vn total[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            total[r][n] = add ? load_vn(out + r * out_stride + n * WIDTH) : vn{};
    for (int64_t d = 0; d < depth; d++) {
        vn columns[N];
        memcpy(columns, b + d * b_stride, sizeof columns);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                total[r][n] = Lane<T>::multiply_add(total[r][n], a[r * a_stride + d], columns[n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) memcpy(out + r * out_stride, total[r], sizeof total[r]);
}

template <typename T, int R>
void multiply_rows(
    const typename Lane<T>::type* a, int64_t a_stride, const float* b, int64_t b_stride, float* out, int64_t out_stride,
    int64_t depth, int64_t width, bool add) {
    constexpr int N = R > 4 || R == MAX_PRODUCT_ROWS ? VECTORS_OF_ROWS : VECTORS_OF_FEW_ROWS;
    int64_t c = 0;
    for (; c + N * WIDTH <= width; c += N * WIDTH)
        multiply_block<T, R, N>(a, a_stride, b + c, b_stride, out + c, out_stride, depth, add);
    for (; c < width; c += WIDTH)
        multiply_block<T, R, 1>(a, a_stride, b + c, b_stride, out + c, out_stride, depth, add);
}

// As multiply_rows, for up to R rows.
template <typename T, int R>
void multiply_some(
    int64_t rows, const typename Lane<T>::type* a, int64_t a_stride, const float* b, int64_t b_stride, float* out,
    int64_t out_stride, int64_t depth, int64_t width, bool add) {
    if (rows == R) return multiply_rows<T, R>(a, a_stride, b, b_stride, out, out_stride, depth, width, add);
    if constexpr (R > 1) multiply_some<T, R - 1>(rows, a, a_stride, b, b_stride, out, out_stride, depth, width, add);
}

// As multiply_rows, for any number of rows; width: a multiple of LANES.
template <typename T>
void multiply(
    int64_t rows, const typename Lane<T>::type* a, int64_t a_stride, const float* b, int64_t b_stride, float* out,
    int64_t out_stride, int64_t depth, int64_t width, bool add) {
    for (int64_t r = 0; r < rows; r += MAX_PRODUCT_ROWS) {
        const int64_t n = rows - r < MAX_PRODUCT_ROWS ? rows - r : MAX_PRODUCT_ROWS;
        multiply_some<T, MAX_PRODUCT_ROWS>(
            n, a + r * a_stride, a_stride, b, b_stride, out + r * out_stride, out_stride, depth, width, add);
    }
}

// ---- packing

// to[i][j] = x[j][i] for the first n rows of to.
inline void transpose(const vf* x, float* to, int64_t stride, int64_t n) {
#ifdef __AVX512F__
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)x[i], (__m512)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)x[i], (__m512)x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = (__m512d)a[i + j], high = (__m512d)a[i + j + 2];
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    // b[4 g + c] has columns c, c + 4, c + 8 and c + 12 of rows 4 g to 4 g + 3.
    for (int c = 0; c < 4; c++) {
        __m512 first = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x44), second = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x44);
        a[c] = _mm512_shuffle_f32x4(first, second, 0x88), a[4 + c] = _mm512_shuffle_f32x4(first, second, 0xdd);
        first = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xee), second = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xee);
        a[8 + c] = _mm512_shuffle_f32x4(first, second, 0x88), a[12 + c] = _mm512_shuffle_f32x4(first, second, 0xdd);
    }
    if (n == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) store(to + i * stride, (vf)a[i]);
        return;
    }
    for (int64_t i = 0; i < n; i++) store(to + i * stride, (vf)a[i]);
#else
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < 16; j++) to[i * stride + j] = x[j][i];
#endif
}

// Where the positions of a tile lie in a cache, from its beginning; -1 for those that are not read.
struct Places {
    int64_t offsets[TILE];

    Places(const Attention& attention, const Item& item, int64_t tile_begin, int64_t begin, int64_t end) {
        const int32_t* blocks = attention.block_table + item.seq * attention.table_stride;
        for (int64_t& offset : offsets) offset = -1;
        for (int64_t position = begin; position < end;) {
            const int64_t block = position / attention.block_size, block_begin = block * attention.block_size;
            int64_t offset = blocks[block] * attention.block_stride + (position - block_begin) * attention.slot_stride +
                             item.kv_head * attention.head_stride;
            const int64_t stop = block_begin + attention.block_size < end ? block_begin + attention.block_size : end;
            for (; position < stop; position++, offset += attention.slot_stride) offsets[position - tile_begin] = offset;
        }
    }

    template <typename T>
    const T* row(const T* cache, int64_t position) const {
        alignas(64) static const T zeros[MAX_HEAD_DIM] = {};
        return offsets[position] < 0 ? zeros : cache + offsets[position];
    }
};

// Keys of SUB positions, a lane each: packed[d][position], d counting lanes of a head.
template <typename T>
void pack_keys(const T* cache, const Places& places, int64_t begin, int64_t width, int64_t head_dim, float* packed) {
    constexpr int64_t STEP = LANES * Lane<T>::NUMBERS;
    for (int64_t p = 0; p < width; p += LANES) {
        const T* rows[LANES];
        for (int64_t i = 0; i < LANES; i++) rows[i] = places.row(cache, begin + p + i);
        in_steps<STEP>(head_dim, [&](int64_t d, int64_t n) {
            vf x[LANES];
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) x[i] = Lane<T>::load_row(rows[i] + d, n);
            const int64_t lanes = (n + Lane<T>::NUMBERS - 1) / Lane<T>::NUMBERS;
            transpose(x, packed + d / Lane<T>::NUMBERS * SUB + p, SUB, lanes);
        });
    }
}

// Values of up to SUB positions, a lane for each number of a head: packed[position / Lane<T>::NUMBERS][number].
template <typename T>
void pack_values(const T* cache, const Places& places, int64_t begin, int64_t count, int64_t head_dim, int64_t stride,
                 float* packed) {
    for (int64_t p = 0; p < count; p += Lane<T>::NUMBERS) {
        const T* first = places.row(cache, begin + p);
        const T* last = places.row(cache, begin + p + Lane<T>::NUMBERS - 1);
        in_steps<LANES * Lane<T>::NUMBERS>(
            head_dim, [&](int64_t d, int64_t n) { Lane<T>::load_values(first + d, last + d, n, packed + d); });
        packed += stride;
    }
}

// ---- rows

inline int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Of a row's partial result: the weighted sum of values, then the largest score, then the total of weights.
inline int64_t partial_stride(int64_t head_dim) { return rounded_up(head_dim, 2 * LANES) + LANES; }

// 2^x for x <= 0, within 2 units in the last place (coefficients: Cephes); 0 below -126.
inline vf exp2(vf x) {
    vi vanishes = x < -126.0f;
    vf bounded = select(vanishes, vf{}, x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vf shifted = bounded + magic;
    vf r = bounded - (shifted - magic);
    vf p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    vf scale = (vf)(((vi)shifted - (vi)splat(magic) + 127) << 23);
    return select(vanishes, vf{}, p * scale);
}

// Positions in a tile.
struct Range {
    int64_t begin, end;
};

// An item's rows: the position of each, and where they are in the step.
struct Rows {
    int64_t num, stride, positions[ROWS], tokens[ROWS], heads[ROWS];

    Rows(const Attention& attention, const Item& item) : num(item.num_rows) {
        const int64_t group = attention.num_heads / attention.num_kv_heads;
        const int64_t first_token = attention.query_starts[item.seq], end_token = attention.query_starts[item.seq + 1];
        for (int64_t r = 0; r < num; r++) {
            tokens[r] = first_token + (item.first_row + r) / group;
            positions[r] = attention.seq_lens[item.seq] - end_token + tokens[r];
            heads[r] = item.kv_head * group + (item.first_row + r) % group;
        }
    }

    // What any of them sees of a tile.
    Range seen(int64_t window, int64_t tile_begin) const { return {seen_by(0, window, tile_begin).begin, seen_by(num - 1, window, tile_begin).end}; }

    // What one of them sees of a tile; begin may be behind end.
    Range seen_by(int64_t r, int64_t window, int64_t tile_begin) const {
        const int64_t end = positions[r] + 1 - tile_begin, begin = window && end > window ? end - window : 0;
        return {begin, end < TILE ? end : TILE};
    }
};

// Scores of one row to weights, in place: of those in [seen.begin, seen.end) of the positions in `all`, which are whole
// vectors. Writes the largest score and the total.
template <typename T>
void weigh(float* scores, Range all, Range seen, float factor, float* largest, float* total) {
    vf tops = splat(-INFINITY);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = all.begin; i < all.end; i += LANES) {
        vf x = load(scores + i);
        if (i < seen.begin || i + LANES > seen.end) {
            vi position = lanes + (int32_t)i;
            x = select((position >= (int32_t)seen.begin) & (position < (int32_t)seen.end), x, splat(-INFINITY));
            store(scores + i, x);
        }
        tops = select(x > tops, x, tops);
    }
    *largest = max(tops);
    const float base = *largest == -INFINITY ? 0.0f : *largest;
    vf sums{};
    auto* weights = (typename Lane<T>::type*)scores;
    for (int64_t i = all.begin; i < all.end; i += LANES) {
        vf weight = exp2((load(scores + i) - base) * factor);
        sums += weight;
        Lane<T>::store_weights(weights + i / Lane<T>::NUMBERS, weight);
    }
    *total = sum(sums);
}

// Adds a tile's partial result to those before.
__attribute__((noinline)) void fold(float* row, const float* tile, int64_t width, float factor) {
    float *largest = row + width, *total = largest + 1;
    const float top = tile[width] > *largest ? tile[width] : *largest, base = top == -INFINITY ? 0.0f : top;
    const vf distances = {*largest - base, tile[width] - base}, shares = exp2(distances * factor);
    const float before = shares[0], now = shares[1];
    for (int64_t i = 0; i < width; i += LANES) store(row + i, load(row + i) * before + load(tile + i) * now);
    *largest = top, *total = *total * before + tile[width + 1] * now;
}

// One call: a layer's queries, cache and output.
template <typename T>
struct Call {
    const Attention& attention;
    const T* q;
    int64_t q_stride;
    const T *k, *v;
    T* out;
    float* partials;
    float scale, soft_cap;  // 0 for none

    typedef typename Lane<T>::type lane;
    float factor() const { return (soft_cap ? 1.0f : scale) * 1.44269504f; }
    int64_t width() const { return rounded_up(attention.head_dim, LANES * Lane<T>::NUMBERS); }
    int64_t query_stride() const { return width() / Lane<T>::NUMBERS; }

    void load_queries(const Rows& rows, lane* queries) const {
        for (int64_t r = 0; r < rows.num; r++) {
            const T* row = q + rows.tokens[r] * q_stride + rows.heads[r] * attention.head_dim;
            in_steps<LANES * Lane<T>::NUMBERS>(attention.head_dim, [&](int64_t d, int64_t n) {
                vf x = Lane<T>::load_row(row + d, n);
                memcpy(queries + r * query_stride() + d / Lane<T>::NUMBERS, &x, sizeof x);
            });
        }
    }

    void cap(float* scores, Range all) const {
        for (int64_t i = all.begin; i < all.end; i += LANES)
            store(scores + i, aserve::tanh(load(scores + i) * (scale / soft_cap)) * soft_cap);
    }

    // The partial results of some rows from one tile.
    void attend_tile(const Item& item, const Rows& rows, const lane* queries, int64_t tile, float* partial) const {
        alignas(64) float scores[ROWS * TILE], packed[SUB * MAX_HEAD_DIM];
        const int64_t head_dim = attention.head_dim, tile_begin = tile * TILE, stride = partial_stride(head_dim);
        const Range seen = rows.seen(attention.window, tile_begin);
        const Range all = {seen.begin / LANES * LANES, rounded_up(seen.end, LANES)};
        const Places places(attention, item, tile_begin, tile_begin + seen.begin, tile_begin + seen.end);
        const int64_t first_sub = seen.begin / SUB * SUB, lanes = rounded_up(head_dim, Lane<T>::NUMBERS) / Lane<T>::NUMBERS;
        for (int64_t sub = first_sub; sub < seen.end; sub += SUB) {
            const int64_t count = all.end - sub < SUB ? all.end - sub : SUB;
            pack_keys(k, places, sub, count, head_dim, packed);
            multiply<T>(
                rows.num, queries, query_stride(), packed, SUB, scores + sub, TILE, lanes, count, false);
        }
        for (int64_t r = 0; r < rows.num; r++) {
            float *row = scores + r * TILE, *largest = partial + r * stride + width();
            if (soft_cap) cap(row, all);
            weigh<T>(row, all, rows.seen_by(r, attention.window, tile_begin), factor(), largest, largest + 1);
        }
        const lane* weights = (const lane*)scores;
        for (int64_t sub = first_sub; sub < seen.end; sub += SUB) {
            const int64_t begin = sub < all.begin ? all.begin : sub;
            const int64_t count = (seen.end - sub < SUB ? seen.end : sub + SUB) - begin;
            pack_values(v, places, begin, count, head_dim, width(), packed);
            multiply<T>(
                rows.num, weights + begin / Lane<T>::NUMBERS, TILE, packed, width(), partial, stride,
                rounded_up(count, Lane<T>::NUMBERS) / Lane<T>::NUMBERS, width(), sub > first_sub);
        }
    }

    void write(const Rows& rows, const float* results) const {
        const int64_t stride = partial_stride(attention.head_dim);
        for (int64_t r = 0; r < rows.num; r++) {
            T* row = out + (rows.tokens[r] * attention.num_heads + rows.heads[r]) * attention.head_dim;
            const float *result = results + r * stride, factor = 1.0f / result[width() + 1];
            in_steps<LANES * Lane<T>::NUMBERS>(
                attention.head_dim, [&](int64_t d, int64_t n) { Lane<T>::write(row + d, result + d, factor, n); });
        }
    }

    void attend(const Item& item) const {
        alignas(64) lane queries[ROWS * MAX_HEAD_DIM];
        const Rows rows(attention, item);
        load_queries(rows, queries);
        const int64_t stride = partial_stride(attention.head_dim);
        if (item.partial >= 0) return attend_tile(item, rows, queries, item.first_tile, partials + item.partial * stride);
        alignas(64) float results[ROWS * (MAX_HEAD_DIM + LANES)], tile_results[ROWS * (MAX_HEAD_DIM + LANES)];
        start(results, rows.num);
        for (int64_t tile = item.first_tile; tile < item.end_tile; tile++) {
            attend_tile(item, rows, queries, tile, tile_results);
            fold_rows(results, tile_results, rows.num);
        }
        write(rows, results);
    }

    void combine(const Item& item) const {
        alignas(64) float results[ROWS * (MAX_HEAD_DIM + LANES)];
        const Rows rows(attention, item);
        start(results, rows.num);
        for (int64_t i = 0; i < item.num_partials; i++)
            fold_rows(results, partials + (item.partial + i * rows.num) * partial_stride(attention.head_dim), rows.num);
        write(rows, results);
    }

    void start(float* results, int64_t num_rows) const {
        const int64_t stride = partial_stride(attention.head_dim);
        memset(results, 0, num_rows * stride * sizeof *results);
        for (int64_t r = 0; r < num_rows; r++) results[r * stride + width()] = -INFINITY;
    }

    void fold_rows(float* results, const float* tile_results, int64_t num_rows) const {
        const int64_t stride = partial_stride(attention.head_dim);
        for (int64_t r = 0; r < num_rows; r++) fold(results + r * stride, tile_results + r * stride, width(), factor());
    }
};

template <typename T>
void attend(
    const Attention* attention, const Item* items, const T* q, int64_t q_stride, const T* k, const T* v, T* out,
    float* partials, float scale, float soft_cap) {
    const Call<T> call{*attention, q, q_stride, k, v, out, partials, scale, soft_cap};
#pragma omp parallel if (attention->cost * attention->head_dim * TILE > GRAIN)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < attention->num_items; i++) call.attend(items[i]);
        if (attention->num_partial_rows) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < attention->num_items; i++)
                if (items[i].num_partials) call.combine(items[i]);
        }
    }
}

// function(item) for some rows at once, and all tiles that they see. Long ones first: threads end together.
template <typename Function>
void each_item(const Attention& attention, Function function) {
    const int64_t group = attention.num_heads / attention.num_kv_heads;
    for (int64_t seq = attention.num_seqs - 1; seq >= 0; seq--) {
        const int64_t num_queries = attention.query_starts[seq + 1] - attention.query_starts[seq];
        const int64_t num_rows = num_queries * group, first_position = attention.seq_lens[seq] - num_queries;
        for (int64_t row = num_rows ? (num_rows - 1) / ROWS * ROWS : -1; row >= 0; row -= ROWS) {
            const int64_t rows = num_rows - row < ROWS ? num_rows - row : ROWS;
            const int64_t last = first_position + (row + rows - 1) / group, first = first_position + row / group;
            const int64_t first_key = attention.window && first >= attention.window ? first + 1 - attention.window : 0;
            for (int64_t head = 0; head < attention.num_kv_heads; head++)
                function(Item{(int32_t)seq, (int32_t)head, (int32_t)row, (int32_t)rows, (int32_t)(first_key / TILE),
                              (int32_t)(last / TILE + 1), -1, 0});
        }
    }
}

inline int64_t cost_of(const Item& item) {
    return (item.end_tile - item.first_tile) * (item.num_rows + COST_OF_PACKING);
}

}  // namespace

extern "C" {

// Deals the step out, over so many threads: items may be null, and are counted then. An item that would keep the others
// waiting is split into its tiles.
void plan_attention(Attention* attention, Item* items, int64_t num_threads) {
    int64_t cost = 0, num_items = 0, num_partial_rows = 0;
    each_item(*attention, [&](const Item& item) { cost += cost_of(item); });
    each_item(*attention, [&](const Item& item) {
        const int64_t num_tiles = item.end_tile - item.first_tile;
        if (num_threads == 1 || num_tiles == 1 || cost_of(item) * ITEMS_PER_THREAD * num_threads <= cost) {
            if (items) items[num_items] = item;
            num_items++;
            return;
        }
        for (int64_t i = 0; i < num_tiles; i++) {
            const int32_t tile = item.first_tile + i;
            if (items)
                items[num_items] = {item.seq, item.kv_head, item.first_row, item.num_rows, tile, tile + 1,
                                    (int32_t)num_partial_rows, i ? 0 : (int32_t)num_tiles};
            num_items++;
            num_partial_rows += item.num_rows;
        }
    });
    attention->num_items = num_items, attention->num_partial_rows = num_partial_rows, attention->cost = cost;
}

void attend_f32(
    const Attention* attention, const Item* items, const float* q, int64_t q_stride, const float* k, const float* v,
    float* out, float* partials, float scale, float soft_cap) {
    attend(attention, items, q, q_stride, k, v, out, partials, scale, soft_cap);
}

void attend_bf16(
    const Attention* attention, const Item* items, const bf16* q, int64_t q_stride, const bf16* k, const bf16* v,
    bf16* out, float* partials, float scale, float soft_cap) {
    attend(attention, items, q, q_stride, k, v, out, partials, scale, soft_cap);
}
}
