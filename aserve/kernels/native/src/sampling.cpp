// Sampling and scoring of rows of logits, one row at a time. Twins: reference.py, which defines what is kept and drawn.
//
// Nothing is sorted. The weight where a filter ends is found by its bits, which order like the weight: a histogram of
// the first eleven says in which of their buckets it lies, histograms of the others where in that bucket. Masses are
// whole numbers, so that their sums are exact in any order.
#include "simd.h"

#include <omp.h>

using namespace aserve;

// How S rows of V logits are sampled; see SamplingBatch in ops.py.
struct Sampling {
    int64_t rows, vocab, stride, num_banned;
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const int64_t *seeds, *positions, *banned;
    float* scratch;  // of each thread, three numbers a logit
};

// What changes the logits of some rows before they are sampled; see LogitControls in ops.py.
struct Controls {
    int64_t rows, vocab, stride, num_banned, num_words, word_length, num_recent;
    const int64_t *row_ids, *table_rows;
    const float* bias;                                    // or null
    const int32_t* counts;                                // or null
    const float *presence, *frequency, *repetition;
    const int64_t *banned, *words, *word_rows, *recent;   // or null
    float* scratch;                                       // of each thread, a number a logit
};

namespace {

constexpr double MASS_UNIT = 4294967296.0;
constexpr int64_t NO_TOKEN = -1;
constexpr float LARGEST_PENALIZED = 0x1p120f;

// e^((logit - largest) / temperature) of a row, 0 where that has no mass, and room for as many again.
struct Weights { float *weights, *candidates; int64_t vocab; };

uint64_t mass(float weight) { return (uint64_t)((double)weight * MASS_UNIT); }

// Philox-4x32-10 (Salmon et al., 2011): the first word of key = seed, counter = position; see philox.py.
uint32_t random_word(uint64_t seed, uint64_t position) {
    uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

// The largest logit, NaN if any is.
template <typename T> float largest(const T* logits, int64_t vocab) {
    vf most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    vi has_nan{};
    auto see = [&](vf v, vf& most) { most = select(v > most, v, most), has_nan |= v != v; };
    int64_t i = 0;
    for (; i + 4 * LANES <= vocab; i += 4 * LANES)
        for (int part = 0; part < 4; part++) see(load(logits + i + part * LANES), most[part]);
    for (; i < vocab; i++) see(splat(load_some(logits + i, 1)[0]), most[0]);
    for (int part = 1; part < 4; part++) see(most[part], most[0]);
    return any(has_nan) ? NAN : aserve::max(most[0]);
}

template <typename T> int64_t first_equal(const T* logits, int64_t vocab, float value) {
    int64_t i = 0;
    while (i + LANES <= vocab && !any(load(logits + i) == value)) i += LANES;
    for (; i < vocab; i++) if (load_some(logits + i, 1)[0] == value) return i;
    return NO_TOKEN;
}

template <typename T> void weigh(const T* logits, int64_t vocab, float most, float temperature, Weights& kept) {
    in_pieces(vocab, [&](int64_t i, int64_t n) {
        vf v = aserve::exp((load_piece(logits + i, n) - most) / temperature);
        store_piece(kept.weights + i, select(v >= (float)(1.0 / MASS_UNIT), v, vf{}), n);
    });
}

// Of the weights in [begin, end) that are not under the floor, which is above 0.
uint64_t mass_of(const Weights& kept, float floor, int64_t begin, int64_t end) {
    typedef float vf8 __attribute__((vector_size(32)));
    typedef int32_t vi8 __attribute__((vector_size(32)));
    typedef double vd8 __attribute__((vector_size(64)));
    typedef int64_t vl8 __attribute__((vector_size(64)));
    vl8 masses{};
    uint64_t total = 0;
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
        vf8 v = load_as<vf8>(kept.weights + i);
        v = (vf8)((vi8)v & (v >= floor));
        masses += __builtin_convertvector(__builtin_convertvector(v, vd8) * MASS_UNIT, vl8);
    }
    for (; i < end; i++) total += kept.weights[i] >= floor ? mass(kept.weights[i]) : 0;
    for (int lane = 0; lane < 8; lane++) total += masses[lane];
    return total;
}

// The largest of the weights such that what it and those above it count reaches `needed`, which they do all together.
template <typename Count> float reaches(const Weights& kept, float floor, uint64_t needed, Count count) {
    uint64_t buckets[2048];
    uint32_t prefix = 0;
    const float* weights = kept.weights;
    int64_t num_weights = kept.vocab;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
        const uint32_t mask = shift ? 2047 : 1023;
        memset(buckets, 0, sizeof buckets);
        for (int64_t i = 0; i < num_weights; i++)
            if (weights[i] >= floor) buckets[load_as<uint32_t>(weights + i) >> shift & mask] += count(weights[i]);
        uint32_t bucket = mask;
        while (bucket > 0 && buckets[bucket] < needed) needed -= buckets[bucket--];
        prefix |= bucket << shift;
        int64_t num_left = 0;
        for (int64_t i = 0; i < num_weights; i++) {
            kept.candidates[num_left] = weights[i];
            num_left += (load_as<uint32_t>(weights + i) >> shift & mask) == bucket;
        }
        weights = kept.candidates, num_weights = num_left;
    }
    return load_as<float>(&prefix);
}

// The smallest weight that is kept. What has no mass never is: nobody could draw it.
float filter_floor(const Weights& kept, int64_t top_k, float top_p, float min_p) {
    const float least = (float)(1.0 / MASS_UNIT);
    float floor = least;
    if (top_k > 0 && top_k < kept.vocab)
        floor = fmaxf(least, reaches(kept, 0, top_k, [](float) -> uint64_t { return 1; }));
    if (top_p < 1) {
        double needed = ceil((double)top_p * (double)mass_of(kept, floor, 0, kept.vocab));
        floor = reaches(kept, floor, needed < 1 ? 1 : (uint64_t)needed, mass);
    }
    return fmaxf(floor, min_p);
}

// The first id whose cumulative mass exceeds word / 2^32 of the total: the tile where that happens, then the id in it.
int64_t draw(const Weights& kept, float floor, uint32_t word) {
    const int64_t tile = 512;
    const double target = ::floor((double)word / MASS_UNIT * (double)mass_of(kept, floor, 0, kept.vocab));
    uint64_t cumulative = 0;
    for (int64_t begin = 0; begin < kept.vocab; begin += tile) {
        const int64_t end = at_most(begin + tile, kept.vocab);
        const uint64_t inside = mass_of(kept, floor, begin, end);
        if ((double)(cumulative + inside) <= target) cumulative += inside;
        else
            for (int64_t i = begin; i < end; i++) {
                cumulative += kept.weights[i] >= floor ? mass(kept.weights[i]) : 0;
                if ((double)cumulative > target) return i;
            }
    }
    return NO_TOKEN;
}

template <typename T> int64_t sample_row(const Sampling& how, const T* logits, int64_t row, Weights& kept) {
    const float most = largest(logits, how.vocab);
    if (!isfinite(most)) return NO_TOKEN;
    if (how.temperature[row] == 0) return first_equal(logits, how.vocab, most);
    weigh(logits, how.vocab, most, how.temperature[row], kept);
    return draw(kept, filter_floor(kept, how.top_k[row], how.top_p[row], how.min_p[row]),
                random_word(how.seeds[row], how.positions[row]));
}

// A copy of the row without the tokens that it may not have, if there are any.
template <typename T> bool without_banned(const Sampling& how, const T* logits, int64_t row, float* copy) {
    const int64_t* ids = how.banned + row * how.num_banned;
    bool copied = false;
    for (int64_t c = 0; c < how.num_banned; c++) {
        if (ids[c] < 0) continue;
        if (!copied) convert(logits, how.vocab, copy);
        copied = true, copy[ids[c]] = -INFINITY;
    }
    return copied;
}

template <typename T> void sample_rows(const Sampling& how, const T* logits, int64_t* out) {
#pragma omp parallel for schedule(dynamic) if (how.rows > 1 && how.rows * how.vocab > GRAIN)
    for (int64_t row = 0; row < how.rows; row++) {
        float* memory = how.scratch + omp_get_thread_num() * how.vocab * 3;
        Weights kept{memory, memory + how.vocab, how.vocab};
        float* copy = memory + 2 * how.vocab;
        const T* own = logits + row * how.stride;
        out[row] = how.num_banned && without_banned(how, own, row, copy) ? sample_row(how, (const float*)copy, row, kept)
                                                                         : sample_row(how, own, row, kept);
    }
}

inline vf penalized(const Controls& how, int64_t row, vf logits, vi counts) {
    const vi generated = counts >> 1;
    const vf bound = splat(LARGEST_PENALIZED), times = __builtin_convertvector(generated, vf);
    const vf bounded = select(logits > bound, bound, select(logits < -bound, -bound, logits));
    const float repetition = how.repetition[row];
    const vf repeated = select(bounded > 0, bounded / repetition, bounded * repetition);
    const vi is_finite = logits - logits == 0;
    return select((counts > 0) & is_finite, repeated, logits) - times * how.frequency[row] -
           select(generated > 0, splat(how.presence[row]), vf{});
}

// Whether the tokens before a word's last were generated just now.
bool follows(const Controls& how, const int64_t* word, const int64_t* recent) {
    const int64_t before = how.word_length - 1;
    for (int64_t i = 0; i < before; i++)
        if (word[i] >= 0 && word[i] != recent[how.num_recent - before + i]) return false;
    return true;
}

// Biases and penalties, then what is banned, which is -inf whatever was added; unless nothing were left of the row.
void control_row(const Controls& how, int64_t row, float* logits, float* changed) {
    const int64_t table = how.table_rows[row] * how.vocab;
    in_pieces(how.vocab, [&](int64_t i, int64_t n) {
        vf v = load_piece(logits + i, n);
        if (how.bias) v += load_piece(how.bias + table + i, n);
        if (how.counts) {
            const vi counts = (vi)load_piece((const float*)how.counts + table + i, n);
            if (any(counts)) v = penalized(how, row, v, counts);
        }
        store_piece(changed + i, v, n);
    });
    const int64_t* banned = how.banned + row * how.num_banned;
    for (int64_t c = 0; c < how.num_banned; c++) if (banned[c] >= 0) changed[banned[c]] = -INFINITY;
    for (int64_t w = 0; w < how.num_words; w++) {
        const int64_t* word = how.words + w * how.word_length;
        if (how.word_rows[w] == row && follows(how, word, how.recent + how.table_rows[row] * how.num_recent))
            changed[word[how.word_length - 1]] = -INFINITY;
    }
    if (largest(changed, how.vocab) != -INFINITY) memcpy(logits, changed, how.vocab * sizeof *logits);
}

// log(sum(e^logit)): in float32 by runs of 512, whose sums are added up in float64.
float log_sum_exp(const float* logits, int64_t vocab, float most) {
    double total = 0;
    for (int64_t begin = 0; begin < vocab; begin += 512) {
        vf run{};
        in_pieces(at_most(512, vocab - begin), [&](int64_t i, int64_t n) {
            vf v = aserve::exp(load_piece(logits + begin + i, n) - most);
            for (int64_t lane = n; lane < LANES; lane++) v[lane] = 0;
            run += v;
        });
        total += sum(run);
    }
    return most + (float)log(total);
}

int64_t rank_of(const float* logits, int64_t vocab, float value) {
    vi count{};
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) count -= load(logits + i) >= value;
    int64_t total = sum(count);
    for (; i < vocab; i++) total += logits[i] >= value;
    return total;
}

// The largest logits, best first, and the lowest id of equals first: each is put in its place among those so far.
void top(const float* logits, int64_t vocab, int64_t num_top, int64_t* ids, float* values) {
    int64_t count = 0;
    auto put = [&](int64_t id) {
        int64_t place = count < num_top ? count++ : num_top - 1;
        for (; place > 0 && logits[id] > values[place - 1]; place--)
            ids[place] = ids[place - 1], values[place] = values[place - 1];
        ids[place] = id, values[place] = logits[id];
    };
    int64_t i = 0;
    for (; i < num_top; i++) put(i);
    while (i < vocab) {
        if (i + LANES <= vocab && !any(load(logits + i) > values[num_top - 1])) i += LANES;
        else
            for (int64_t end = at_most(i + LANES, vocab); i < end; i++)
                if (logits[i] > values[num_top - 1]) put(i);
    }
}

}  // namespace

extern "C" {

void sample_f32(const Sampling* how, const float* logits, int64_t* out) { sample_rows(*how, logits, out); }

void sample_bf16(const Sampling* how, const bf16* logits, int64_t* out) { sample_rows(*how, logits, out); }

void control_f32(const Controls* how, float* logits) {
#pragma omp parallel for schedule(dynamic) if (how->rows > 1 && how->rows * how->vocab > GRAIN)
    for (int64_t row = 0; row < how->rows; row++)
        control_row(
            *how, row, logits + how->row_ids[row] * how->stride, how->scratch + omp_get_thread_num() * how->vocab);
}

// -inf where the bit of a mask is 0, in the row that the mask is of; see TokenMasks in ops.py.
void mask_f32(float* logits, int64_t stride, int64_t vocab, const int64_t* rows, const uint32_t* words,
    int64_t num_words, int64_t num_masks) {
#pragma omp parallel for schedule(dynamic) if (num_masks > 1 && num_masks * vocab > GRAIN)
    for (int64_t mask = 0; mask < num_masks; mask++)
        for (int64_t first = 0; first < vocab; first += 32) {
            const uint32_t bits = words[mask * num_words + first / 32];
            if (bits == ~0u) continue;
            float* own = logits + rows[mask] * stride + first;
            const int64_t count = at_most(32, vocab - first);
            for (int64_t i = 0; i < count; i++) own[i] = bits >> i & 1 ? own[i] : -INFINITY;
        }
}

// Of a target a row, and of the num_top likeliest; see Scores in ops.py.
void score_f32(const float* logits, int64_t rows, int64_t vocab, const int64_t* targets, int64_t num_top,
    float* logprobs, int64_t* ranks, int64_t* top_ids, float* top_logprobs, float* normalizers) {
#pragma omp parallel for schedule(dynamic) if (rows > 1 && rows * vocab > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float* own = logits + row * vocab;
        const float normalizer = log_sum_exp(own, vocab, largest(own, vocab)), value = own[targets[row]];
        logprobs[row] = value - normalizer, normalizers[row] = normalizer;
        ranks[row] = rank_of(own, vocab, value);
        if (num_top == 0) continue;
        float* values = top_logprobs + row * num_top;
        top(own, vocab, num_top, top_ids + row * num_top, values);
        for (int64_t i = 0; i < num_top; i++) values[i] -= normalizer;
    }
}
}
