// What adapters add to a linear layer (LoRA): out += x A B, of each row by the factors of its own adapter, in two passes:
// x A, a few numbers a row, into a buffer, and from there B's share of each output.
// A row has the same bits whatever else is in the step: its sums are taken in one order, beside those of up to ROWS - 1
// other rows of its adapter, so that a factor is read once for all of them.
#include <vector>

#include "small_products.h"

using namespace aserve;

struct Lora {
    const int64_t* tokens;   // by adapter
    const int32_t* starts;   // of each adapter's tokens, adapters + 1
    const int32_t* ranks;    // of each adapter
    const int64_t* sizes;    // outputs of each part
    int64_t adapters, parts, inputs, outputs, rank;
    int64_t a_stride, b_stride;  // from one adapter's factors to the next one's
    int64_t x_stride, out_stride;
    float* shrunk;  // [tokens, parts, rank]
};

namespace {

constexpr int64_t ROWS = 4;
constexpr int64_t RUN = 256;      // inputs that are widened at once
constexpr int64_t CHUNK = 1024;   // outputs of a chunk
constexpr int64_t PARALLEL = 1 << 16;  // products that are worth a second thread

// Tokens of an adapter that are computed at once. first: its place among the tokens.
struct Tile { int64_t adapter, first, count; };

// Outputs of a part that one thread computes at a time.
struct Chunk { int64_t part, begin, count; };

std::vector<Tile> tiles_of(const Lora* lora) {
    std::vector<Tile> tiles;
    for (int64_t g = 0; g < lora->adapters; g++)
        for (int64_t first = lora->starts[g]; first < lora->starts[g + 1]; first += ROWS)
            tiles.push_back({g, first, at_most(ROWS, lora->starts[g + 1] - first)});
    return tiles;
}

std::vector<Chunk> chunks_of(const Lora* lora) {
    std::vector<Chunk> chunks;
    for (int64_t part = 0, end = 0, begin = 0; part < lora->parts; part++)
        for (end += lora->sizes[part]; begin < end; begin += chunks.back().count)
            chunks.push_back({part, begin, at_most(CHUNK, end - begin)});
    return chunks;
}

template <typename T> void shrink(const Lora* lora, const T* a, const T* x, Tile tile, int64_t part) {
    const int64_t rank = lora->rank, width = lora->parts * rank;
    float* totals = lora->shrunk + tile.first * width + part * rank;
    alignas(64) float run[ROWS * RUN];
    for (int64_t begin = 0; begin < lora->inputs; begin += RUN) {
        const int64_t n = at_most(RUN, lora->inputs - begin);
        for (int r = 0; r < tile.count; r++)
            convert(x + lora->tokens[tile.first + r] * lora->x_stride + begin, n, run + r * RUN);
        const Lines<T> lines{a + tile.adapter * lora->a_stride + (part * lora->inputs + begin) * rank, rank};
        multiply<Floats>(
            tile.count, run, RUN, lines, totals, width, n, rounded_up(lora->ranks[tile.adapter], LANES), begin > 0);
    }
}

// What is left of a chunk behind whole vectors is computed number by number.
template <typename T> void expand(const Lora* lora, const T* b_all, T* out, Tile tile, Chunk chunk) {
    const int64_t width = lora->parts * lora->rank, depth = lora->ranks[tile.adapter];
    const int64_t whole = chunk.count / LANES * LANES;
    const T* b = b_all + tile.adapter * lora->b_stride + chunk.begin;
    const float* shrunk = lora->shrunk + tile.first * width + chunk.part * lora->rank;
    alignas(64) float sums[ROWS * CHUNK];
    multiply<Floats>(tile.count, shrunk, width, Lines<T>{b, lora->outputs}, sums, CHUNK, depth, whole, false);
    for (int r = 0; r < tile.count; r++) {
        float* own = sums + r * CHUNK;
        for (int64_t o = whole; o < chunk.count; o++) {
            own[o] = 0;
            for (int64_t k = 0; k < depth; k++)
                own[o] += shrunk[r * width + k] * load_some(b + k * lora->outputs + o, 1)[0];
        }
        T* to = out + lora->tokens[tile.first + r] * lora->out_stride + chunk.begin;
        in_pieces(chunk.count, [&](int64_t o, int64_t n) {
            store_piece(to + o, load_piece(to + o, n) + load_piece(own + o, n), n);
        });
    }
}

template <typename T> void add_lora(const Lora* lora, const T* a, const T* b, const T* x, T* out) {
    const std::vector<Tile> tiles = tiles_of(lora);
    const std::vector<Chunk> chunks = chunks_of(lora);
    const int64_t num_tiles = tiles.size(), num_chunks = chunks.size(), parts = lora->parts;
#pragma omp parallel if (num_tiles * ROWS * lora->rank * (lora->inputs + lora->outputs) > PARALLEL)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tiles * parts; i++) shrink(lora, a, x, tiles[i / parts], i % parts);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tiles * num_chunks; i++)
            expand(lora, b, out, tiles[i / num_chunks], chunks[i % num_chunks]);
    }
}

}  // namespace

#define KERNEL(T, name)                                                                                               \
    void add_lora_##name(const Lora* lora, const T* a, const T* b, const T* x, T* out) { add_lora(lora, a, b, x, out); }

extern "C" {
KERNEL(float, f32)
KERNEL(bf16, bf16)
}
