// As many numbers at once as a register of the processor holds. (Of wider vectors, which are several registers, GCC
// keeps each in memory.) Numbers are kept as T (float or bf16) and computed with as float.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace aserve {

#if defined(__AVX512F__)
constexpr int64_t REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int64_t REGISTER_BYTES = 32;
#else
constexpr int64_t REGISTER_BYTES = 16;
#endif
constexpr int64_t LANES = REGISTER_BYTES / 4;
constexpr int64_t LINE = 64;  // bytes, of the caches

// A loop of a known number of turns, without the loop.
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t vi __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t vu __attribute__((vector_size(REGISTER_BYTES)));
typedef uint16_t vh __attribute__((vector_size(REGISTER_BYTES / 2)));
typedef uint8_t vb __attribute__((vector_size(REGISTER_BYTES / 4)));

struct bf16 { uint16_t bits; };

inline vf splat(float x) { return vf{} + x; }

// The same bits as another type, or as many of those that lie there as that has.
template <typename To, typename From> inline To load_as(const From* p) {
    To to;
    memcpy(&to, p, sizeof to);
    return to;
}

// Words of 16 bits to such of 32; of these, which are less than 2^16, to such of 16; and their low bytes. (With AVX2 alone
// GCC takes up to thirty instructions for what is written as it is elsewhere.)
#if defined(__AVX2__) && !defined(__AVX512F__)
inline vu widened(vh v) { return (vu)_mm256_cvtepu16_epi32((__m128i)v); }
inline vh narrowed(vu v) {
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v, __m256i{}), 0x08));
}
inline vb low_bytes(vu v) { return (vb)_mm_cvtsi128_si64(_mm_packus_epi16((__m128i)narrowed(v & 0xff), __m128i{})); }
#else
inline vu widened(vh v) { return __builtin_convertvector(v, vu); }
inline vh narrowed(vu v) { return __builtin_convertvector(v, vh); }
inline vb low_bytes(vu v) { return __builtin_convertvector(v, vb); }
#endif

inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const bf16* p) { return (vf)(widened(load_as<vh>(p)) << 16); }

template <typename V> inline void store_as(void* p, V v) { memcpy(p, &v, sizeof v); }

inline void store(float* p, vf v) { store_as(p, v); }

// To the nearest bfloat16, halves to even; what is not a number stays so. The processor's own instruction takes what is
// smaller than 2^-126 for 0.
inline vh round_to_bf16(vf v) {
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh(v);
#else
    const vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, is_number = (vu)(v == v);
    return narrowed((rounded & is_number) | (~is_number & 0x7fc0));
#endif
}

inline void store(bf16* p, vf v) { store_as(p, round_to_bf16(v)); }

// The first n of a vector; the others are 0.
template <typename T> inline vf load_some(const T* p, int64_t n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

template <typename T> inline void store_some(T* p, vf v, int64_t n) {
    T padded[LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof(T));
}

// function(begin, n) over [0, width) in pieces of so many, n being fewer in the last piece alone.
template <int64_t PIECE = LANES, typename Function> inline void in_pieces(int64_t width, Function function) {
    int64_t i = 0;
    for (; i + PIECE <= width; i += PIECE) function(i, PIECE);
    if (i < width) function(i, width - i);
}

template <typename T> inline vf load_piece(const T* p, int64_t n) { return n == LANES ? load(p) : load_some(p, n); }

template <typename T> inline void store_piece(T* p, vf v, int64_t n) { n == LANES ? store(p, v) : store_some(p, v, n); }

// Numbers of one type as those of another, or of the same.
template <typename T> inline void convert(const T* from, int64_t n, T* to) { memcpy(to, from, n * sizeof *to); }

template <typename From, typename To> inline void convert(const From* from, int64_t n, To* to) {
    in_pieces(n, [&](int64_t i, int64_t count) { store_piece(to + i, load_piece(from + i, count), count); });
}

template <typename V> inline auto sum(V v) {
    for (int half = LANES / 2; half > 0; half /= 2) for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

template <typename V> inline auto max(V v) {
    auto largest = v[0];
    for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

inline bool any(vi condition) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#else
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total |= condition[lane];
    return total;
#endif
}

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t rounded_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

inline vf select(vi condition, vf yes, vf no) { return (vf)(((vi)yes & condition) | ((vi)no & ~condition)); }

// e^x within 2 units in the last place: 2^n e^r with |r| <= ln(2) / 2, e^r by its series (as in Cephes). Below -87.3 it
// is 0; above 88.3 it is some 2e38.
inline vf exp(vf x) {
#ifdef __AVX512F__
    const vf bounded = _mm512_min_ps(splat(88.3f), x);  // what is not a number stays so
#else
    const vi vanishes = x < -87.33654f;
    const vf bounded = select(x > 88.3f, splat(88.3f), select(vanishes, splat(0), x));
#endif
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const vf shifted = bounded * 1.44269504f + magic, n = shifted - magic;
    const vf r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = (((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r;
    p = ((p + 1.6666665459e-1f) * r + 5.0000001201e-1f) * r * r + r + 1.0f;
#ifdef __AVX512F__
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-87.33654f), _CMP_NLT_UQ), p, n);
#else
    const vf scale = (vf)(((vi)shifted - (vi)splat(magic) + 127) << 23);
    return select(vanishes, vf{}, p * scale);
#endif
}

inline vf tanh(vf x) {
    const vf e = exp(select(x < 0, x, -x) * 2.0f), size = (1.0f - e) / (1.0f + e);
    return select(x < 0, -size, size);
}

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// What is worth a second thread: bytes or so that one thread works on in some microseconds.
constexpr int64_t GRAIN = 16384;

}  // namespace aserve
