// What products of all types share: x W^T + b, tile by tile. W is packed in panels of PANEL outputs, and in a panel step by
// step, a step being the inputs of one word of each output, so that all that some numbers of x are multiplied by lies
// side by side.
// A row has the same bits with any number of others and on any threads: an output adds up a run of its inputs one after
// the other, and then those sums, whatever is computed beside it.
#pragma once
#include <omp.h>

#include "simd.h"

namespace aserve {

struct Layer {
    const uint32_t* weights;  // packed
    const void* bias;         // or null
    int64_t inputs, outputs;
    int64_t group;  // of int8: inputs that share a scale, or 0 for all
    int64_t gated;  // panels of gates, behind which lie as many of what is gated: out is silu(gate) times that. Or 0
};

constexpr int64_t VECTORS = LANES == 8 ? 2 : 4, PANEL = VECTORS * LANES;
constexpr int64_t MANY_ROWS = 16;            // for fewer, panels are dealt one by one, or in pairs
constexpr int64_t PARALLEL_FLOPS = 1 << 16;  // what is worth a second thread

// The first of part i of `whole`, in so many parts of about the same size.
inline int64_t part(int64_t whole, int64_t parts, int64_t i) { return whole * i / parts; }

// How numbers of some type are multiplied is told by a type, `Steps`:
//   ROWS, ALIGN                 rows of a tile; a tile begins at a multiple of ALIGN
//   ROW_BLOCK, GROUP            so many rows are computed for so many panels, a run of inputs at a time, before others are
//   PAIRED                      of so many rows or fewer two panels are computed at once: of one there are too few sums
//                               for what a step adds to each not to wait for the step before
//   CHUNK                       steps from one fetching of weights ahead to the next
//   Unit, tile                  what a thread holds while it works; as add_run, for any number of rows up to ROWS
//   RUN, INPUTS_PER_STEP        inputs; a run's weights for a panel stay in the first cache, from tile to tile
//   SCALE_WORDS                 behind the weights of each run of a panel
//   Rows, spread, X, X_PER_RUN  x, and how n inputs of a row are made ready: as so many X a run, of which a step takes
//   X_PER_STEP, step            so many, and adds what they are multiplied to
//   Sum, start, fold            a vector of sums, what it begins with, and how it is added to the total behind a run
//   Extra, extra                what else is known of the rows that a tile begins with
template <typename Steps> inline int64_t run_words(int64_t inputs) {
    return ceil_div(inputs, Steps::INPUTS_PER_STEP) * PANEL + Steps::SCALE_WORDS;
}

template <typename Steps> inline int64_t panel_words(int64_t inputs) {
    const int64_t rest = inputs % Steps::RUN;
    return inputs / Steps::RUN * run_words<Steps>(Steps::RUN) + (rest ? run_words<Steps>(rest) : 0);
}

// Adds the products of a tile's COUNT rows with a run of weights to their totals: of PANELS panels, which lie so many
// words apart. Meanwhile some lines of the weights that come next are fetched, so that memory is never idle.
template <typename Steps, int COUNT, int PANELS = 1>
void add_run(int64_t apart, const uint32_t* weights, const typename Steps::X* x, typename Steps::Extra extra,
    int64_t steps, float* totals, const char* ahead, int64_t lines) {
    constexpr int64_t CHUNK = Steps::CHUNK;
    typename Steps::Sum sums[PANELS][COUNT][VECTORS];
    const auto each_sum = [&](auto function) {
        UNROLL for (int p = 0; p < PANELS; p++)
            UNROLL for (int r = 0; r < COUNT; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) function(p, r, v);
    };
    each_sum([&](int p, int r, int v) { sums[p][r][v] = Steps::start(extra, r); });
    const auto step = [&](int64_t s) {
        UNROLL for (int p = 0; p < PANELS; p++)
            Steps::template step<COUNT>(sums[p], weights + p * apart + s * PANEL, x + s * Steps::X_PER_STEP);
    };
    int64_t done = 0;
    for (; done + CHUNK <= steps; done += CHUNK) {
        UNROLL for (int64_t s = 0; s < CHUNK; s++) step(done + s);
        UNROLL for (int64_t i = 0; i < CHUNK * PANEL * 4 / LINE && i < lines; i++)
            UNROLL for (int p = 0; p < PANELS; p++) __builtin_prefetch(ahead + i * LINE + p * apart * 4, 0, 2);
        ahead += lines * LINE;
    }
    for (; done < steps; done++) step(done);
    each_sum([&](int p, int r, int v) {
        float* total = totals + (p * Steps::ROW_BLOCK + r) * PANEL + v * LANES;
        const uint32_t* scales = weights + p * apart + steps * PANEL + v * LANES;
        store(total, Steps::fold(load(total), sums[p][r][v], extra, r, scales));
    });
}

// By the vector unit: the sums of a tile, ROWS x VECTORS of them, stay in registers.
struct ByVectors {
    struct Unit { Unit() {} };
    static constexpr int64_t ROWS = 6, ALIGN = 1, CHUNK = 4;
    // As measured. Each group copies a block's rows once more: the more panels it has, the less that costs.
    static constexpr int64_t ROW_BLOCK = LANES == 8 ? 64 : 96, GROUP = LANES == 8 ? 16 : 4, PAIRED = LANES == 8 ? 3 : 0;

    template <typename Steps, typename... Arguments>
    static void tile(int64_t count, int64_t apart, Arguments... arguments) {
        constexpr int TWO = PAIRED ? 2 : 1;
        static constexpr decltype(&add_run<Steps, 1>) by_count[] = {
            add_run<Steps, 1>,      add_run<Steps, 2>,      add_run<Steps, 3>,
            add_run<Steps, 4>,      add_run<Steps, 5>,      add_run<Steps, 6>,
            add_run<Steps, 1, TWO>, add_run<Steps, 2, TWO>, add_run<Steps, 3, TWO>};
        by_count[(apart ? ROWS : 0) + count - 1](apart, arguments...);
    }
};

template <typename T> void store_totals(const Layer* layer, const float* totals, T* out, int64_t rows, int64_t panel) {
    const int64_t first = panel * PANEL, count = at_most(PANEL, layer->outputs - first);
    const T* bias = (const T*)layer->bias;
    for (int64_t r = 0; r < rows; r++)
        in_pieces(count, [&](int64_t i, int64_t n) {
            vf total = load_piece(totals + r * PANEL + i, n);
            if (bias) total += load_piece(bias + first + i, n);
            store_piece(out + r * layer->outputs + first + i, total, n);
        });
}

// In T, as an output would be.
template <typename T> vf rounded(const float* total, const T* bias) {
    T numbers[LANES];
    store(numbers, bias ? load(total) + load(bias) : load(total));
    return load(numbers);
}

template <typename T>
void store_gated(const Layer* layer, const float* gate, const float* up, T* out, int64_t rows, int64_t panel) {
    const int64_t width = layer->gated * PANEL;
    const T* bias = (const T*)layer->bias;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PANEL; i += LANES, gate += LANES, up += LANES) {
            const int64_t o = panel * PANEL + i;
            const vf kept = silu(rounded(gate, bias ? bias + o : bias));
            store(out + r * width + o, kept * rounded(up, bias ? bias + width + o : bias));
        }
}

// A block of rows, from row_begin on, by the panels from `first` up to `end`, of a gated layer's gates, each with what it
// gates. next: the weights that this thread takes then.
template <typename Steps, typename T>
void multiply(const Layer* layer, const typename Steps::Rows& x, T* out, int64_t row_begin, int64_t rows, int64_t first,
    int64_t end, const uint32_t* next) {
    typedef typename Steps::X X;
    alignas(64) X spreaded[Steps::ROW_BLOCK * Steps::X_PER_RUN];
    alignas(64) float totals[Steps::GROUP][Steps::ROW_BLOCK * PANEL];
    const int64_t words = panel_words<Steps>(layer->inputs), tiles = ceil_div(rows, Steps::ROWS);
    const int64_t units = ceil_div(rows, Steps::ALIGN), all_lines = ceil_div(Steps::CHUNK * PANEL * 4 / LINE, tiles);
    const int64_t each = layer->gated ? 2 : 1, panels = (end - first) * each;
    const auto place = [&](int64_t p) { return (p / each + p % each * layer->gated) * words; };
    for (int64_t p = 0; p < panels; p++) memset(totals[p], 0, rows * PANEL * sizeof(float));
    const uint32_t* weights = layer->weights + first * words;
    for (int64_t begin = 0; begin < layer->inputs; begin += Steps::RUN, weights += run_words<Steps>(Steps::RUN)) {
        const int64_t n = at_most(Steps::RUN, layer->inputs - begin);
        const int64_t steps = ceil_div(n, Steps::INPUTS_PER_STEP), tile_lines = all_lines * ceil_div(steps, Steps::CHUNK);
        const uint32_t* after = begin + Steps::RUN < layer->inputs ? weights + run_words<Steps>(Steps::RUN) : next;
        for (int64_t r = 0; r < rows; r++) Steps::spread(x, row_begin + r, begin, n, spreaded + r * Steps::X_PER_RUN);
        for (int64_t p = 0, at_once; p < panels; p += at_once) {
            at_once = rows <= Steps::PAIRED && p + 1 < panels ? 2 : 1;
            const char* ahead = (const char*)(p + at_once < panels ? weights + place(p + at_once) : after);
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t row = part(units, tiles, t) * Steps::ALIGN;
                const int64_t count = at_most(part(units, tiles, t + 1) * Steps::ALIGN, rows) - row;
                const int64_t lines = t * tile_lines < steps * PANEL * 4 / LINE ? all_lines : 0;
                Steps::template tile<Steps>(count, place(p + at_once - 1) - place(p), weights + place(p),
                    spreaded + row * Steps::X_PER_RUN, Steps::extra(x, row_begin + row, begin / Steps::RUN), steps,
                    totals[p] + row * PANEL, ahead + t * tile_lines * LINE, lines);
            }
        }
    }
    out += row_begin * (layer->outputs / each);
    for (int64_t p = 0; p < panels; p += each)
        each == 2 ? store_gated(layer, totals[p], totals[p + 1], out, rows, first + p / 2)
                  : store_totals(layer, totals[p], out, rows, first + p);
}

// A thread's share of blocks of rows times groups of panels, each of which is for the thread that is free first. A group
// is as large as leaves each other thread as much, when its last block is taken; so groups become smaller, down to one
// panel, and no thread waits long for another. The weights that a thread fetches ahead are those that it has next if all
// are equally fast. taken: how many tasks are, by all threads.
template <typename Steps, typename T>
void work(const Layer* layer, const typename Steps::Rows& x, T* out, int64_t rows, int64_t* taken) {
    const int64_t panels = layer->gated ? layer->gated : ceil_div(layer->outputs, PANEL);
    const int64_t words = panel_words<Steps>(layer->inputs), few = rows <= Steps::PAIRED ? 2 : 1;
    const int64_t many = ceil_div(rows < MANY_ROWS ? few : Steps::GROUP, layer->gated ? 2 : 1);
    if (rows == 0) return;
    const typename Steps::Unit unit;
    const int64_t units = ceil_div(rows, Steps::ALIGN), blocks = ceil_div(units, Steps::ROW_BLOCK / Steps::ALIGN);
    const int64_t threads = omp_get_num_threads();
    const auto skip = [&](int64_t panel, int64_t groups) {  // from a group's first panel to a later one's
        for (; groups > 0 && panel < panels; groups--)
            panel += 1 + at_most(many - 1, (panels - panel - 1) * blocks / (threads + blocks - 1));
        return panel;
    };
    for (int64_t task, group = 0, first = 0;; group = task / blocks) {
        task = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        if ((first = skip(first, task / blocks - group)) == panels) return;
        const int64_t next = skip(first, (task + threads) / blocks - task / blocks);
        const int64_t begin = part(units, blocks, task % blocks) * Steps::ALIGN;
        const int64_t end = at_most(part(units, blocks, task % blocks + 1) * Steps::ALIGN, rows);
        multiply<Steps>(layer, x, out, begin, end - begin, first, skip(first, 1),
            layer->weights + (next < panels ? next : first) * words);
    }
}

}  // namespace aserve
