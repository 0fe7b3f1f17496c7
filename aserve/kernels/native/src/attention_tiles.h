// A tile of the context in the paged cache: what an item's rows see of it, where that lies, and its keys and values as a
// product takes them.
#pragma once
#include "small_products.h"

namespace aserve {

// Some layers of a step: its sequences, and how they lie in these layers' caches. Strides count numbers.
struct Attention {
    const int32_t *block_table, *seq_lens, *query_starts;
    int64_t num_seqs, table_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_size, block_stride, slot_stride, head_stride;
    int64_t window;  // 0 for none
    // Written by plan_attention: of items, of rows of their partial results, and of work.
    int64_t num_items, num_partial_rows, cost;
};

// What a thread does at once: some key heads, of each the same rows of a sequence, and some tiles of their context.
struct Item {
    int32_t seq, first_kv_head, num_heads, first_row, num_rows, first_tile, end_tile;
    int32_t partial;       // where its partial results go, in rows; -1: it has all tiles, and writes the output
    int32_t num_partials;  // of a row's first item, how many partial results are folded into the output; else 0
};

inline int64_t rows_of(const Item& item) { return item.num_heads * item.num_rows; }

// MAX_WIDTH: of the key heads of an item, together.
constexpr int64_t TILE = 256, SUB = 64, MAX_HEAD_DIM = 256, MAX_WIDTH = 256;

// ---- vectors

// Lanes of a, then of b, by their numbers from 0 to 2 LANES - 1, where `from` says which; it is known when compiled.
template <typename From> inline vf pick(vf a, vf b, From from) {
    vf v;
#ifdef __clang__
    for (int i = 0; i < LANES; i++) v[i] = from(i) < LANES ? a[from(i)] : b[from(i) - LANES];
#else
    vi lanes;
    UNROLL for (int i = 0; i < LANES; i++) lanes[i] = from(i);
    v = __builtin_shuffle(a, b, lanes);
#endif
    return v;
}

// Exchanges rows and columns: blocks of one number, then of two, ...
template <int BLOCK = 1> inline void transpose(vf* x) {
    if constexpr (BLOCK < LANES) {
        UNROLL for (int i = 0; i < LANES; i++) {
            if (i & BLOCK) continue;
            vf a = x[i], b = x[i + BLOCK];
            x[i] = pick(a, b, [](int lane) { return lane & BLOCK ? LANES + lane - BLOCK : lane; });
            x[i + BLOCK] = pick(a, b, [](int lane) { return lane & BLOCK ? LANES + lane : lane + BLOCK; });
        }
        transpose<2 * BLOCK>(x);
    }
}

// ---- words: 32 bits of a row, which are a float or two bfloat16

template <typename T> constexpr int64_t IN_WORD = 4 / sizeof(T);

// The words of n numbers; what is left is 0.
template <typename T> inline vf load_words(const T* p, int64_t n) {
    vf v{};
    if (n == LANES * IN_WORD<T>) return memcpy(&v, p, sizeof v), v;
    memcpy(&v, p, n * sizeof *p);
    return v;
}

// function(index, numbers) for the first number of each word, then for the second.
template <typename Function> inline void split(const float*, vf words, Function function) { function(0, words); }

template <typename Function> inline void split(const bf16*, vf words, Function function) {
    function(0, (vf)((vi)words << 16));
    function(1, (vf)((vi)words & (int32_t)0xffff0000));
}

// Numbers in the order of a row, of those of the first halves of words and of the second.
inline void join(const float*, const float* halves, float* to) { memcpy(to, halves, sizeof(vf)); }

inline void join(const bf16*, const float* halves, float* to) {
    vf first = load(halves), second = load(halves + LANES);
    store(to, pick(first, second, [](int lane) { return lane / 2 + (lane & 1) * LANES; }));
    store(to + LANES, pick(first, second, [](int lane) { return LANES / 2 + lane / 2 + (lane & 1) * LANES; }));
}

// ---- packing

// Values where they lie, in the order of `pack_values`.
template <typename T> struct Lying {
    const T* cache;
    const int64_t* offsets;
    static constexpr int VECTORS = IN_WORD<T>;

    template <int N> void columns(int64_t d, int64_t c, vf* x) const {
        UNROLL for (int n = 0; n < N; n += VECTORS)
            split(cache, load_words(cache + offsets[d] + c + n * LANES, LANES * VECTORS), [&](int64_t half, vf numbers) {
                x[n + half] = numbers;
            });
    }
};

// Positions in a tile.
struct Range { int64_t begin, end; };

// What an item's rows see of a tile, and where that lies in a cache, from its beginning; -1 for what is not read.
struct Places {
    Range seen{0, 0};
    int64_t offsets[TILE];

    void find(const Attention& attention, const Item& item, int64_t tile) {
        const int64_t group = attention.num_heads / attention.num_kv_heads, tile_begin = tile * TILE;
        const int64_t num_queries = attention.query_starts[item.seq + 1] - attention.query_starts[item.seq];
        const int64_t first = attention.seq_lens[item.seq] - num_queries + item.first_row / group;
        const int64_t last = first + (item.first_row % group + item.num_rows - 1) / group;
        const int64_t unseen = attention.window ? first + 1 - attention.window - tile_begin : 0;
        seen = {unseen > 0 ? unseen : 0, at_most(last + 1 - tile_begin, TILE)};
        for (int64_t i = seen.begin / SUB * SUB; i < seen.begin; i++) offsets[i] = -1;
        for (int64_t i = seen.end; i % LANES; i++) offsets[i] = -1;
        const int32_t* blocks = attention.block_table + item.seq * attention.table_stride;
        for (int64_t i = seen.begin; i < seen.end;) {
            const int64_t block = (tile_begin + i) / attention.block_size, within = (tile_begin + i) % attention.block_size;
            int64_t offset = blocks[block] * attention.block_stride + within * attention.slot_stride +
                             item.first_kv_head * attention.head_stride;
            const int64_t stop = at_most(i + attention.block_size - within, seen.end);
            for (; i < stop; i++, offset += attention.slot_stride) offsets[i] = offset;
        }
    }

    template <typename T> const T* row(const T* cache, int64_t position) const {
        alignas(64) static const T zeros[MAX_HEAD_DIM] = {};
        return offsets[position] < 0 ? zeros : cache + offsets[position];
    }

    // Reads a line after the other of what is seen of positions [begin, end), `width` numbers of each: waiting for them, by
    // which the processor sees where it is to read on, or while something else is computed.
    template <bool WAIT, typename T> void fetch(const T* cache, int64_t width, int64_t begin, int64_t end) const {
        for (int64_t i = begin < seen.begin ? seen.begin : begin; i < at_most(end, seen.end); i++) {
            const char* row = (const char*)(cache + offsets[i]);
            for (int64_t byte = 0; byte < width * (int64_t)sizeof(T); byte += LINE)
                if (WAIT) (void)*(const volatile char*)(row + byte);
                else __builtin_prefetch(row + byte, 0, 2);
        }
    }
};

// Keys of `width` positions, a lane each: packed[number][position], or packed[word][position] for words. numbers: how many
// of each position, those of one head or of several. Memory brings their values meanwhile, some with each piece of keys:
// all at once would keep the keys waiting.
template <typename Numbers, typename T>
void pack_keys(const T* k, const T* v, const Places& places, int64_t begin, int64_t width, int64_t numbers,
    float* packed) {
    for (int64_t p = 0; p < width; p += LANES) {
        places.fetch<true>(k, numbers, begin + p, begin + p + LANES);
        places.fetch<false>(v, numbers, begin + p, begin + p + LANES);
        const T* rows[LANES];
        for (int64_t i = 0; i < LANES; i++) rows[i] = places.row(k, begin + p + i);
        in_pieces<LANES * IN_WORD<T>>(numbers, [&](int64_t d, int64_t n) {
            vf x[LANES];
            UNROLL for (int64_t i = 0; i < LANES; i++) x[i] = load_words(rows[i] + d, n);
            transpose(x);
            UNROLL for (int64_t i = 0; i < LANES; i++)
                if constexpr (Numbers::IN_X == 2) store(packed + (d / 2 + i) * SUB + p, x[i]);
                else split(k, x[i], [&](int64_t half, vf floats) {
                    store(packed + (d + i * IN_WORD<T> + half) * SUB + p, floats);
                });
        });
    }
}

// Values of `count` positions, a lane for each number of a head, those of the first halves of words before the others:
// packed[position][number].
template <typename T>
void pack_values(const T* cache, const Places& places, int64_t begin, int64_t count, int64_t head_dim, int64_t stride,
    float* packed) {
    for (int64_t p = 0; p < count; p++, packed += stride) {
        const T* row = places.row(cache, begin + p);
        in_pieces<LANES * IN_WORD<T>>(head_dim, [&](int64_t d, int64_t n) {
            split(cache, load_words(row + d, n), [&](int64_t half, vf numbers) {
                store(packed + d + half * LANES, numbers);
            });
        });
    }
}

}  // namespace aserve
