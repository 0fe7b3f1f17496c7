// Attention to the paged cache where it lies, for decoding and for prompts alike. Twin: reference.py.
//
// A row is one head of one token. Its keys are taken in tiles of TILE positions, which begin at multiples of TILE: each
// tile yields a maximum, a total of weights and a weighted sum of values, and these are folded into the row's in order
// (online softmax: Milakov and Gimelshein, 2018; tiles on different threads: flash-decoding, Dao et al., 2023). All of
// a row's sums are its own, and take its keys in order: its bits depend neither on the rows that are computed with it nor
// on which thread has which tile. What a row does not see has a weight of 0; what no row of an item sees is not read.
//
// Keys are packed, SUB positions at once, for a product that has positions in the lanes of its vectors and takes several
// rows for each vector loaded. So are values where rows are many; few rows are multiplied by values where they lie.
// bfloat16 is widened to float. Where the processor's own dot products (AVX512-BF16) are fast, scores are computed with
// those, from the same numbers; weights never are, since they would be rounded.
//
// A cache is larger than what the processor has near it, and waiting for its memory takes longer than computing. Memory
// is fastest where it is read line after line: the key heads of a position, which lie one behind the other, are for one
// thread where there is work enough for all, and what is seen of them is read in that order before it is computed with.
#include <math.h>

#include "attention_tiles.h"

using namespace aserve;

namespace {

constexpr int64_t ROWS = 64;
constexpr int64_t COST_OF_PACKING = 4;   // of a tile, in rows
constexpr int64_t ITEMS_PER_THREAD = 4;  // so that threads end at about the same time

// ---- rows

// Of a row's partial result: the weighted sum of values, then the largest score, then the total of weights.
inline int64_t partial_stride(int64_t head_dim) { return rounded_up(head_dim, 2 * LANES) + LANES; }

// An item's rows, those of a key head together: the position of each, and where they are in the step.
struct Rows {
    int64_t num, of_head, positions[ROWS], tokens[ROWS], heads[ROWS];

    Rows(const Attention& attention, const Item& item) : num(rows_of(item)), of_head(item.num_rows) {
        const int64_t group = attention.num_heads / attention.num_kv_heads;
        const int64_t first_token = attention.query_starts[item.seq], end_token = attention.query_starts[item.seq + 1];
        for (int64_t r = 0; r < num; r++) {
            const int64_t row = item.first_row + r % of_head;
            tokens[r] = first_token + row / group;
            positions[r] = attention.seq_lens[item.seq] - end_token + tokens[r];
            heads[r] = (item.first_kv_head + r / of_head) * group + row % group;
        }
    }

    // What one of them sees of a tile; begin may be behind end.
    Range seen_by(int64_t r, int64_t window, int64_t tile_begin) const {
        const int64_t end = positions[r] + 1 - tile_begin, begin = window && end > window ? end - window : 0;
        return {begin, at_most(end, TILE)};
    }
};

// Scores of one row to weights, in place: of those in [seen.begin, seen.end) of the positions in `all`, which are whole
// vectors. Writes the largest score and the total.
void weigh(float* scores, Range all, Range seen, float factor, float* largest, float* total) {
    vf tops = vf{} - INFINITY, sums{};
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int64_t i = all.begin; i < all.end; i += LANES) {
        vf x = load(scores + i);
        if (i < seen.begin || i + LANES > seen.end) {
            vi position = lanes + (int32_t)i;
            x = select((position >= (int32_t)seen.begin) & (position < (int32_t)seen.end), x, vf{} - INFINITY);
            store(scores + i, x);
        }
        tops = select(x > tops, x, tops);
    }
    const float top = aserve::max(tops), base = top == -INFINITY ? 0.0f : top;
    for (int64_t i = all.begin; i < all.end; i += LANES) {
        vf weight = aserve::exp((load(scores + i) - base) * factor);
        sums += weight;
        store(scores + i, weight);
    }
    *largest = top, *total = 0;
    for (int i = 0; i < LANES; i++) *total += sums[i];
}

// Adds a tile's partial result to those before.
__attribute__((noinline)) void fold(float* row, const float* tile, int64_t width, float factor) {
    float *largest = row + width, *total = largest + 1;
    const float top = tile[width] > *largest ? tile[width] : *largest, base = top == -INFINITY ? 0.0f : top;
    const vf distances = {*largest - base, tile[width] - base}, shares = aserve::exp(distances * factor);
    const float before = shares[0], now = shares[1];
    for (int64_t i = 0; i < width; i += LANES) store(row + i, load(row + i) * before + load(tile + i) * now);
    *largest = top, *total = *total * before + tile[width + 1] * now;
}

// One call: a layer's queries, cache and output.
template <typename Numbers, typename T, typename KV> struct Call {
    typedef typename Numbers::X X;

    const Attention& attention;
    const T* q;
    int64_t q_stride;
    const KV *k, *v;
    T* out;
    float* partials;
    float scale, soft_cap;  // 0 for none

    float factor() const { return soft_cap ? 1.0f : scale; }
    // Of a row's numbers: whole vectors of words.
    int64_t width() const { return rounded_up(attention.head_dim, LANES * IN_WORD<KV>); }

    void cap(float* scores, Range all) const {
        for (int64_t i = all.begin; i < all.end; i += LANES)
            store(scores + i, aserve::tanh(load(scores + i) * (scale / soft_cap)) * soft_cap);
    }

    // The partial results of some rows from one tile.
    void attend_tile(const Rows& rows, const X* queries, int64_t tile, const Places& places, float* partial) const {
        alignas(64) float scores[ROWS * TILE], packed[SUB * MAX_WIDTH];
        const int64_t head_dim = attention.head_dim, stride = partial_stride(head_dim);
        const int64_t all_heads = rows.num / rows.of_head * head_dim;
        const Range seen = places.seen, all = {seen.begin / LANES * LANES, rounded_up(seen.end, LANES)};
        const int64_t first_sub = seen.begin / SUB * SUB;
        for (int64_t sub = first_sub; sub < seen.end; sub += SUB) {
            const int64_t width = at_most(all.end - sub, SUB);
            pack_keys<Numbers>(k, v, places, sub, width, all_heads, packed);
            for (int64_t r = 0; r < rows.num; r += rows.of_head) {
                const Lines<float> keys{packed + r / rows.of_head * head_dim / Numbers::IN_X * SUB, SUB};
                multiply<Numbers>(rows.of_head, queries + r * MAX_HEAD_DIM, MAX_HEAD_DIM, keys, scores + r * TILE + sub,
                    TILE, ceil_div(head_dim, Numbers::IN_X), width, false);
            }
        }
        for (int64_t r = 0; r < rows.num; r++) {
            float* largest = partial + r * stride + width();
            if (soft_cap) cap(scores + r * TILE, all);
            weigh(scores + r * TILE, all, rows.seen_by(r, attention.window, tile * TILE), factor(), largest, largest + 1);
        }
        const bool packs = rows.of_head > MAX_PRODUCT_ROWS || width() != head_dim;
        for (int64_t sub = first_sub; sub < seen.end; sub += SUB) {
            const int64_t begin = sub < seen.begin ? seen.begin : sub, count = at_most(seen.end, sub + SUB) - begin;
            places.fetch<true>(v, all_heads, begin, begin + count);
            for (int64_t r = 0; r < rows.num; r += rows.of_head) {
                const KV* values = v + r / rows.of_head * head_dim;
                const auto add = [&](const auto& factor) {
                    multiply<Floats>(rows.of_head, scores + r * TILE + begin, TILE, factor, partial + r * stride, stride,
                        count, width(), sub > first_sub);
                };
                if (packs) pack_values(values, places, begin, count, head_dim, width(), packed);
                packs ? add(Lines<float>{packed, width()}) : add(Lying<KV>{values, places.offsets + begin});
            }
        }
    }

    void write(const Rows& rows, const float* results) const {
        const int64_t stride = partial_stride(attention.head_dim);
        for (int64_t r = 0; r < rows.num; r++) {
            T* row = out + (rows.tokens[r] * attention.num_heads + rows.heads[r]) * attention.head_dim;
            const float *result = results + r * stride, factor = 1.0f / result[width() + 1];
            alignas(64) float numbers[MAX_HEAD_DIM];
            for (int64_t d = 0; d < width(); d += LANES * IN_WORD<KV>) join(v, result + d, numbers + d);
            in_pieces(attention.head_dim, [&](int64_t d, int64_t n) {
                store_piece(row + d, load(numbers + d) * factor, n);
            });
        }
    }

    void attend(const Item& item) const {
        alignas(64) X queries[ROWS * MAX_HEAD_DIM];
        alignas(64) float results[ROWS * (MAX_HEAD_DIM + LANES)], tile_results[ROWS * (MAX_HEAD_DIM + LANES)];
        const Rows rows(attention, item);
        Places places;
        for (int64_t r = 0; r < rows.num; r++)
            Numbers::spread(q + rows.tokens[r] * q_stride + rows.heads[r] * attention.head_dim, attention.head_dim,
                queries + r * MAX_HEAD_DIM);
        start(results, rows.num);
        float* to = item.partial < 0 ? tile_results : partials + item.partial * partial_stride(attention.head_dim);
        for (int64_t tile = item.first_tile; tile < item.end_tile; tile++) {
            places.find(attention, item, tile);
            attend_tile(rows, queries, tile, places, to);
            if (item.partial < 0) fold_rows(results, to, rows.num);
        }
        if (item.partial < 0) write(rows, results);
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
        for (float* row = results; row < results + num_rows * stride; row += stride)
            memset(row, 0, stride * sizeof *row), row[width()] = -INFINITY;
    }

    void fold_rows(float* results, const float* tile_results, int64_t num_rows) const {
        const int64_t stride = partial_stride(attention.head_dim);
        for (int64_t r = 0; r < num_rows; r++) fold(results + r * stride, tile_results + r * stride, width(), factor());
    }
};

template <typename Numbers, typename T, typename KV>
void attend(const Attention* attention, const Item* items, const T* q, int64_t q_stride, const KV* k, const KV* v,
    T* out, float* partials, float scale, float soft_cap) {
    const Call<Numbers, T, KV> call{*attention, q, q_stride, k, v, out, partials, scale, soft_cap};
#pragma omp parallel if (attention->cost * attention->head_dim * TILE > GRAIN)
    {
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < attention->num_items; i++) call.attend(items[i]);
        if (attention->num_partial_rows) {
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t i = 0; i < attention->num_items; i++) if (items[i].num_partials) call.combine(items[i]);
        }
    }
}

inline int64_t cost_of(const Item& item) {
    return (item.end_tile - item.first_tile) * item.num_heads * (item.num_rows + COST_OF_PACKING);
}

// function(item) for some rows and key heads at once, and all tiles that they see: as many heads as there is room for,
// and as do not make a tile cost more than an item may. Long ones first: threads end together.
template <typename Function> void each_item(const Attention& attention, int64_t largest_cost, Function function) {
    const int64_t num_kv_heads = attention.num_kv_heads, group = attention.num_heads / num_kv_heads;
    const bool lie_together = attention.head_stride == attention.head_dim && attention.head_dim % 2 == 0;
    for (int64_t seq = attention.num_seqs - 1; seq >= 0; seq--) {
        const int64_t num_queries = attention.query_starts[seq + 1] - attention.query_starts[seq];
        const int64_t num_rows = num_queries * group, first_position = attention.seq_lens[seq] - num_queries;
        for (int64_t row = num_rows ? (num_rows - 1) / ROWS * ROWS : -1; row >= 0; row -= ROWS) {
            const int64_t rows = at_most(num_rows - row, ROWS);
            const int64_t last = first_position + (row + rows - 1) / group, first = first_position + row / group;
            const int64_t first_key = attention.window && first >= attention.window ? first + 1 - attention.window : 0;
            Item item{(int32_t)seq, 0, (int32_t)num_kv_heads, (int32_t)row, (int32_t)rows, (int32_t)(first_key / TILE),
                      (int32_t)(last / TILE + 1), -1, 0};
            const auto too_many = [&] {
                return !lie_together || num_kv_heads % item.num_heads || item.num_heads * attention.head_dim > MAX_WIDTH ||
                       rows_of(item) > ROWS || cost_of(item) > largest_cost * (item.end_tile - item.first_tile);
            };
            while (item.num_heads > 1 && too_many()) item.num_heads--;
            for (; item.first_kv_head < num_kv_heads; item.first_kv_head += item.num_heads) function(item);
        }
    }
}

}  // namespace

extern "C" {

// Deals the step out, over so many threads: items may be null, and are counted then. An item that would keep the others
// waiting is split into its tiles.
void plan_attention(Attention* attention, Item* items, int64_t num_threads) {
    int64_t cost = 0, num_items = 0, num_partial_rows = 0;
    each_item(*attention, 0, [&](const Item& item) { cost += cost_of(item); });
    const int64_t largest_cost = num_threads == 1 ? cost : cost / (ITEMS_PER_THREAD * num_threads);
    each_item(*attention, largest_cost, [&](Item item) {
        const int32_t end_tile = item.end_tile, num_tiles = end_tile - item.first_tile;
        const bool splits = num_tiles > 1 && cost_of(item) > largest_cost;
        if (splits) item.num_partials = num_tiles;
        for (; item.first_tile < end_tile; item.first_tile = item.end_tile, item.num_partials = 0) {
            if (splits) item.end_tile = item.first_tile + 1, item.partial = num_partial_rows;
            if (items) items[num_items] = item;
            num_items++, num_partial_rows += splits ? rows_of(item) : 0;
        }
    });
    attention->num_items = num_items, attention->num_partial_rows = num_partial_rows, attention->cost = cost;
}

#define KERNEL(T, KV, Numbers, name)                                                                                  \
    void attend_##name(const Attention* attention, const Item* items, const T* q, int64_t q_stride, const KV* k,      \
        const KV* v, T* out, float* partials, float scale, float soft_cap) {                                          \
        attend<Numbers>(attention, items, q, q_stride, k, v, out, partials, scale, soft_cap);                         \
    }

KERNEL(float, float, Floats, f32)
KERNEL(float, bf16, Floats, f32_bf16)
KERNEL(bf16, bf16, Floats, bf16)
KERNEL(bf16, bf16, Dots, dots_bf16)
}
