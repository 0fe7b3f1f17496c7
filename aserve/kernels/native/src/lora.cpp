// What adapters add to a linear layer (LoRA): out += x A B, of each row by the factors of its own adapter, in two passes:
// x A, a few numbers a row, into a buffer, and from there B's share of each output.
// A row has the same bits whatever else is in the step: its sums are taken in one order, beside those of up to ROWS - 1
// other rows of its adapter, so that a factor is read once for all of them.
#include "simd.h"

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
constexpr int64_t RUN = 256;      // inputs that are added up before they join the sum
constexpr int64_t CHUNK = 1024;   // outputs that one thread computes at a time
constexpr int64_t PARALLEL = 1 << 16;  // products that are worth a second thread

struct Tile {
    int64_t adapter, first, count;  // first: its place among the tokens
};

int64_t num_tiles(const Lora* lora) {
    int64_t num = 0;
    for (int64_t g = 0; g < lora->adapters; g++) num += (lora->starts[g + 1] - lora->starts[g] + ROWS - 1) / ROWS;
    return num;
}

Tile tile_at(const Lora* lora, int64_t index) {
    for (int64_t g = 0;; g++) {
        const int64_t count = lora->starts[g + 1] - lora->starts[g], tiles = (count + ROWS - 1) / ROWS;
        if (index < tiles) {
            const int64_t left = count - index * ROWS;
            return {g, lora->starts[g] + index * ROWS, left < ROWS ? left : ROWS};
        }
        index -= tiles;
    }
}

// totals[r] += x[r] A for sixteen columns of A and n inputs; even and odd ones are added up apart.
template <typename T, int COUNT>
void shrink_run(const T* a, int64_t a_stride, const float* x, int64_t n, float* totals, int64_t totals_stride) {
    vf even[COUNT] = {}, odd[COUNT] = {};
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) {
        const vf first = load(a + i * a_stride), second = load(a + (i + 1) * a_stride);
        UNROLL for (int r = 0; r < COUNT; r++) {
            even[r] += first * x[r * RUN + i];
            odd[r] += second * x[r * RUN + i + 1];
        }
    }
    if (i < n) {
        const vf last = load(a + i * a_stride);
        for (int r = 0; r < COUNT; r++) even[r] += last * x[r * RUN + i];
    }
    for (int r = 0; r < COUNT; r++) {
        float* total = totals + r * totals_stride;
        store(total, load(total) + (even[r] + odd[r]));
    }
}

template <typename T, int COUNT>
void shrink(const Lora* lora, const T* a_all, const T* x, Tile tile, int64_t part) {
    const int64_t rank = lora->rank, width = lora->parts * rank, vectors = (lora->ranks[tile.adapter] + LANES - 1) / LANES;
    const T* a = a_all + tile.adapter * lora->a_stride + part * lora->inputs * rank;
    float* totals = lora->shrunk + tile.first * width + part * rank;
    for (int r = 0; r < COUNT; r++) memset(totals + r * width, 0, vectors * LANES * sizeof(float));
    float run[COUNT * RUN];
    for (int64_t begin = 0; begin < lora->inputs; begin += RUN) {
        const int64_t n = lora->inputs - begin < RUN ? lora->inputs - begin : RUN;
        for (int r = 0; r < COUNT; r++) {
            const T* from = x + lora->tokens[tile.first + r] * lora->x_stride + begin;
            in_pieces(n, [&](int64_t i, int64_t count) {
                store_piece(run + r * RUN + i, load_piece(from + i, count), count);
            });
        }
        for (int64_t v = 0; v < vectors; v++)
            shrink_run<T, COUNT>(a + begin * rank + v * LANES, rank, run, n, totals + v * LANES, width);
    }
}

// out[r] += shrunk[r] B for the outputs [begin, end) of one part, VECTORS x 16 at a time.
template <typename T, int COUNT>
void expand(const Lora* lora, const T* b_all, T* out, Tile tile, int64_t part, int64_t begin, int64_t end) {
    const int64_t rank = lora->rank, width = lora->parts * rank, used = lora->ranks[tile.adapter];
    const T* b = b_all + tile.adapter * lora->b_stride;
    const float* shrunk = lora->shrunk + tile.first * width + part * rank;
    auto add = [&](int64_t o, const vf* sums, int64_t count) {
        for (int r = 0; r < COUNT; r++) {
            T* to = out + lora->tokens[tile.first + r] * lora->out_stride + o;
            store_piece(to, load_piece(to, count) + sums[r], count);
        }
    };
    int64_t o = begin;
    for (; o + 2 * LANES <= end; o += 2 * LANES) {
        vf left[COUNT] = {}, right[COUNT] = {};
        for (int64_t k = 0; k < used; k++) {
            const vf first = load(b + k * lora->outputs + o), second = load(b + k * lora->outputs + o + LANES);
            UNROLL for (int r = 0; r < COUNT; r++) {
                left[r] += first * shrunk[r * width + k];
                right[r] += second * shrunk[r * width + k];
            }
        }
        add(o, left, LANES);
        add(o + LANES, right, LANES);
    }
    in_pieces(end - o, [&](int64_t i, int64_t count) {
        vf sums[COUNT] = {};
        for (int64_t k = 0; k < used; k++) {
            const vf some = load_piece(b + k * lora->outputs + o + i, count);
            for (int r = 0; r < COUNT; r++) sums[r] += some * shrunk[r * width + k];
        }
        add(o + i, sums, count);
    });
}

template <typename T>
void add_lora(const Lora* lora, const T* a, const T* b, const T* x, T* out) {
    static void (*const shrinks[])(const Lora*, const T*, const T*, Tile, int64_t) = {
        nullptr, shrink<T, 1>, shrink<T, 2>, shrink<T, 3>, shrink<T, 4>};
    static void (*const expands[])(const Lora*, const T*, T*, Tile, int64_t, int64_t, int64_t) = {
        nullptr, expand<T, 1>, expand<T, 2>, expand<T, 3>, expand<T, 4>};
    const int64_t tiles = num_tiles(lora), parts = lora->parts;
    const bool is_large = tiles * ROWS * lora->rank * (lora->inputs + lora->outputs) > PARALLEL;
    int64_t chunks = 0;
    for (int64_t p = 0; p < parts; p++) chunks += (lora->sizes[p] + CHUNK - 1) / CHUNK;
#pragma omp parallel if (is_large)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tiles * parts; task++) {
            const Tile tile = tile_at(lora, task / parts);
            shrinks[tile.count](lora, a, x, tile, task % parts);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tiles * chunks; task++) {
            const Tile tile = tile_at(lora, task / chunks);
            int64_t chunk = task % chunks, part = 0, first = 0;
            for (; chunk >= (lora->sizes[part] + CHUNK - 1) / CHUNK; part++) {
                chunk -= (lora->sizes[part] + CHUNK - 1) / CHUNK;
                first += lora->sizes[part];
            }
            const int64_t begin = chunk * CHUNK, left = lora->sizes[part] - begin;
            expands[tile.count](
                lora, b, out, tile, part, first + begin, first + begin + (left < CHUNK ? left : CHUNK));
        }
    }
}

}  // namespace

extern "C" {
void add_lora_f32(const Lora* lora, const float* a, const float* b, const float* x, float* out) {
    add_lora(lora, a, b, x, out);
}
void add_lora_bf16(const Lora* lora, const bf16* a, const bf16* b, const bf16* x, bf16* out) {
    add_lora(lora, a, b, x, out);
}
}
