// Norms and activations: what is done to each row of a step by itself; copies of blocks; and calls of many kernels.
// Twins: reference.py.
#include <sched.h>

#include "simd.h"

using namespace aserve;

// Layouts of a step's heads; strides count numbers.
struct Heads {
    int64_t tokens, num_heads, num_kv_heads, head_dim;
    int64_t q_stride, k_stride, v_stride;       // from a token to the next
    int64_t k_slot_stride, v_slot_stride;       // from a slot of the cache to the next
    float eps;
};

// Blocks that are copied, each plane of a cache by itself; strides count bytes, as does what a block has of a plane.
struct Moves {
    int64_t num_blocks, num_planes, bytes, from_plane, from_block, to_plane, to_block;
};

// A kernel, and what it is called with: integers and addresses, numbers behind them. It takes as many as it has. All are
// called by one signature: on Linux integers and floats travel apart from each other, and the caller clears up.
struct Call {
    void (*kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
        int64_t, float, float);
    int64_t i[12]; float f[2];
};

namespace {

template <typename T> void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
    vf squares{};
    in_pieces(width, [&](int64_t i, int64_t n) {
        vf v = load_piece(x + i, n);
        squares += v * v;
    });
    const float factor = 1.0f / sqrtf(sum(squares) / width + eps);
    in_pieces(width, [&](int64_t i, int64_t n) {
        store_piece(out + i, load_piece(x + i, n) * factor * load_piece(weight + i, n), n);
    });
}

// The residual is added first, where there is one; total: where the sum is kept.
template <typename T>
void norm_rows(const T* x, int64_t x_stride, const T* residual, const T* weight, T* out, T* total, int64_t rows,
    int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > GRAIN)
    for (int64_t t = 0; t < rows; t++) {
        const T* row = x + t * x_stride;
        if (residual)
            in_pieces(width, [&](int64_t i, int64_t n) {
                store_piece(total + t * width + i, load_piece(row + i, n) + load_piece(residual + t * width + i, n), n);
            });
        norm_row(residual ? total + t * width : row, weight, out + t * width, width, eps);
    }
}

inline vf gelu(vf x) {
    return 0.5f * x * (1.0f + aserve::tanh((x + 0.044715f * x * x * x) * 0.7978845608f));  // sqrt(2 / pi)
}

// A piece is a share of a row, so that one row has the work of all threads. Pieces are whole vectors but for the row's
// last, wherever they begin: an element is computed in the same way in any of them.
template <vf (*ACTIVATION)(vf), typename T> void gated_rows(const T* gate_up, T* out, int64_t rows, int64_t width) {
    const int64_t piece = 1024, pieces = (width + piece - 1) / piece;
#pragma omp parallel for schedule(static) if (rows * width > GRAIN / 4)
    for (int64_t p = 0; p < rows * pieces; p++) {
        const int64_t t = p / pieces, begin = p % pieces * piece;
        const T* gate = gate_up + t * 2 * width + begin;
        in_pieces(begin + piece < width ? piece : width - begin, [&](int64_t i, int64_t n) {
            store_piece(out + t * width + begin + i, ACTIVATION(load_piece(gate + i, n)) * load_piece(gate + width + i, n), n);
        });
    }
}

// Rotates halves of a head: (a, b) becomes (a cos - b sin, b cos + a sin).
template <typename T, typename To> void turn(const T* x, To* out, const float* cos_sin, int64_t half) {
    in_pieces(half, [&](int64_t i, int64_t n) {
        vf a = load_piece(x + i, n), b = load_piece(x + half + i, n);
        vf c = load_piece(cos_sin + i, n), s = load_piece(cos_sin + half + i, n);
        store_piece(out + i, a * c - b * s, n);
        store_piece(out + half + i, b * c + a * s, n);
    });
}

template <typename T, typename KV>
void rope_and_write(const Heads* heads, const T* q, const T* k, const T* v, const T* q_norm, const T* k_norm,
    const float* cos_sin, const int64_t* positions, KV* k_cache, KV* v_cache, const int64_t* slots, T* out) {
    const int64_t D = heads->head_dim, H = heads->num_heads, K = heads->num_kv_heads;
#pragma omp parallel for schedule(static) if (heads->tokens * (H + 2 * K) * D > GRAIN)
    for (int64_t t = 0; t < heads->tokens; t++) {
        const float* turns = cos_sin + positions[t] * D;
        T normed[1024];
        auto write = [&](const T* x, const T* norm, auto* to) {
            if (norm) norm_row(x, norm, normed, D, heads->eps);
            turn(norm ? normed : x, to, turns, D / 2);
        };
        for (int64_t h = 0; h < H; h++) write(q + t * heads->q_stride + h * D, q_norm, out + (t * H + h) * D);
        for (int64_t h = 0; h < K; h++)
            write(k + t * heads->k_stride + h * D, k_norm, k_cache + slots[t] * heads->k_slot_stride + h * D);
        convert(v + t * heads->v_stride, K * D, v_cache + slots[t] * heads->v_slot_stride);
    }
}

}  // namespace

#define KERNELS(T, name)                                                                                              \
    void rms_norm_##name(const T* x, int64_t x_stride, const T* residual, const T* weight, T* out, T* total,          \
        int64_t rows, int64_t width, float eps) {                                                                     \
        norm_rows(x, x_stride, residual, weight, out, total, rows, width, eps);                                       \
    }                                                                                                                 \
    void silu_and_mul_##name(const T* x, T* out, int64_t rows, int64_t width) { gated_rows<silu>(x, out, rows, width); }\
    void gelu_and_mul_##name(const T* x, T* out, int64_t rows, int64_t width) { gated_rows<gelu>(x, out, rows, width); }

#define CACHE_KERNEL(T, KV, name)                                                                                     \
    void rope_and_write_kv_##name(                                                                                    \
        const Heads* heads, const T* q, const T* k, const T* v, const T* q_norm, const T* k_norm,                     \
        const float* cos_sin, const int64_t* positions, KV* k_cache, KV* v_cache, const int64_t* slots, T* out) {     \
        rope_and_write(heads, q, k, v, q_norm, k_norm, cos_sin, positions, k_cache, v_cache, slots, out);             \
    }

extern "C" {
KERNELS(float, f32)
KERNELS(bf16, bf16)
CACHE_KERNEL(float, float, f32)
CACHE_KERNEL(float, bf16, f32_bf16)
CACHE_KERNEL(bf16, bf16, bf16)

// from_ids, to_ids: of the blocks, in order; null for 0, 1, 2, ...
void move_blocks(const Moves* moves, const char* from, const int64_t* from_ids, char* to, const int64_t* to_ids) {
    const int64_t pieces = moves->num_blocks * moves->num_planes;
#pragma omp parallel for schedule(static) if (pieces * moves->bytes > 4 * GRAIN)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t n = piece / moves->num_planes, plane = piece % moves->num_planes;
        memcpy(to + plane * moves->to_plane + (to_ids ? to_ids[n] : n) * moves->to_block,
            from + plane * moves->from_plane + (from_ids ? from_ids[n] : n) * moves->from_block, moves->bytes);
    }
}

// OpenMP's threads look for milliseconds whether there is more for them to do. Has so many let others run first.
void give_way(int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    sched_yield();
}

void call_all(const Call* c, int64_t num_calls) {
    for (const Call* end = c + num_calls; c < end; c++)
        c->kernel(c->i[0], c->i[1], c->i[2], c->i[3], c->i[4], c->i[5], c->i[6], c->i[7], c->i[8], c->i[9], c->i[10], c->i[11],
            c->f[0], c->f[1]);
}
}
