/* The matrix product of an LLM server: a row of the result has the same bits however many rows there are.

   The problem. To compute the next token of each sequence, a model multiplies a few rows of numbers, one row for each
   sequence, by each of its weight matrices. A matrix has hundreds of thousands of weights, and each of them is used once
   for each row. So with one row, or with eight, the time goes into reading the weights from memory, and hardly any into
   arithmetic.

   A typical BLAS (the library that multiplies matrices) is built for the opposite case: hundreds of rows. Then arithmetic
   dominates, and it pays to copy the weights into another order first. With eight rows the copy takes longer than the
   product. And a BLAS chooses its order of summation by the shape of the product. Floating-point addition rounds, so
   another order gives other last digits: a row's result depends on how many other rows there are.

   The solution. This file reads the weights in place, once for all rows (only for many rows it copies them, a few columns
   at a time, into the L1 cache), and computes

       every number of the result as one sum, taken in one order.

   The order depends on the layout of the weights and on nothing else: not on the number of rows, not on the row's place
   among them, not on the thread that computes it, and not on the processor. That sentence is the proof: the result for a
   request does not depend on the rest of its batch. (What MLX computes row by row, such as a norm, never did.) There are
   two layouts of the weights W, each with its own order. LANES is the number of floats in a vector register, and x is one
   row:

       as stored, (N, K)   y[j] = sum over k of x[k] W[j][k]   W[j] is contiguous, so we load LANES weights of one j.
                           There are ORDER = 16 partial sums on every processor: sum i adds every 16th product, starting
                           at k = i. Then the upper half of the sums is added to the lower half, four times, and finally
                           the remaining K % 16 products, one by one. Where a register holds fewer than 16 numbers, the
                           sums are computed in PARTS: first the ones that fit, then the others.

       turned, (K, N)      y[j] = sum over k of x[k] W[k][j]   W[k] is contiguous, so we load LANES weights of one k.
                           Each lane is another j, and adds its products from the first k to the last. So zeros at the
                           end of x change nothing if W is finite there: attention may read beyond the end of a
                           sequence. (`kv.py` scrubs rows that may not be finite.)

   Every multiply-add is fused, and explicit (`fma_`): for `a * b + c` the compiler would decide in each loop whether to
   round once or twice. (-ffp-contract=off keeps it from fusing on its own. The few processors without a fused multiply-add,
   x86 before 2013, round twice: there a row still has the same bits in any batch, but not the bits of other processors.)
   The file is compiled without -ffast-math, which lets a compiler reorder sums.

   Weights may be packed: 16 bits each, or 8 or 4 bits with a scale and an offset for each group. A packed weight is
   converted to the float32 that it stands for, in a register or in scratch memory, and then the sums are the same. So
   packing changes no bit, and reading the weights takes less time in proportion to their size. Optionally, activations are
   rounded to 8 bits, too, and multiplied as integers: twice as fast, less precise, and with other results. Sums of integers
   are exact, so here, too, a row has the same bits in any batch and on any processor.

   In place of a matrix, the caller may also name an operation on each row: a softmax, a gate or a norm. Each operation
   works on a single row, in one order. Attention is an operation, too, with the keys and values of a layer in place of a
   matrix: it has the bits of the formula in `llama.py`, and takes about half the time. The gated delta rule takes the states
   of a layer instead (`delta_net.c`), and a mixture of experts takes a stack of matrices (`experts.c`).

   The file in order: the vectors of each processor; packed weights; a tile, which is the part of the result that is held in
   registers; strips and panels, which stay in the caches; operations; threads; and `cblas_sgemm`, the function that MLX
   calls. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#ifdef __FAST_MATH__
#error "-ffast-math lets the compiler add up in any order"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

/* --- the vectors of each processor -------------------------------------------------------------------------------

   `ROWS` x `COLS` vectors are the sums of a tile. Together with one vector of x for each row and one vector of weights
   they fill the registers: 32 of them, or 16 with AVX2. `KEEP` pins a loaded vector in a register; without it GCC loads
   the vector again for each use. `add_lanes` sums the lanes of each of four vectors into four numbers: it adds the upper
   half to the lower half until one lane is left. `float16s`, `bfloat16s` and `bytes` convert LANES packed numbers to a
   vector; `nibbles` converts the lowest four bits of each word, and `shifted` moves the next four bits there. */

enum { ORDER = 16, COLS = 4, WIDEST = 8, LINE = 16 }; /* LINE: floats in a cache line */

/* Convert a 16-bit number. (All of them are finite.) */
INLINE float of_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
INLINE float bfloat16(uint16_t bits) { return of_bits((uint32_t)bits << 16); }
INLINE float float16(uint16_t bits) { /* the bits at their places in a float32, whose exponents are biased by 112 more */
  float size = of_bits((uint32_t)(bits & 0x7fff) << 13) * 0x1p112f;
  return bits >> 15 ? -size : size;
}

INLINE uint16_t to_float16(float x) { /* rounded to the nearest; not for numbers beyond its range */
  uint32_t bits, size;
  memcpy(&bits, &x, sizeof bits);
  size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7e00;
  if (size < 0x38800000) { /* denormal: the last bit of a sum with 0.5 means 2^-24 there, too */
    const float shifted = of_bits(size) + 0.5f;
    memcpy(&size, &shifted, sizeof size);
    size -= 0x3f000000;
  } else size = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
  return bits >> 16 & 0x8000 | size;
}

#if defined(__AVX512F__)

#include <immintrin.h>
enum { LANES = 16, ROWS = 6, ROUNDED_ROWS = 8 };
typedef __m512 vec;
typedef __m128 four;
#define KEEP(v) __asm__("" : "+v"(v))
#define REST() _mm_pause()
INLINE vec load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store(float *to, vec v) { _mm512_storeu_ps(to, v); }
INLINE void store_four(float *to, four v) { _mm_storeu_ps(to, v); }
INLINE vec all(float number) { return _mm512_set1_ps(number); }
INLINE vec fma_(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec times(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec float16s(const void *at) { return _mm512_cvtph_ps(_mm256_loadu_si256(at)); }
INLINE void store_float16s(void *to, vec v) { _mm256_storeu_si256(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
INLINE vec bytes(const void *at) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at))); }
INLINE vec bfloat16s(const void *at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16));
}

typedef __m512i words;
INLINE words load_words(const void *at) { return _mm512_loadu_si512(at); }
INLINE words shifted(words w) { return _mm512_srli_epi32(w, 4); }

/* With four bits, the 16 possible weights of a group are one vector, and each packed number is an index into it. */
#define HAS_TABLE
INLINE vec sixteen(void) { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
INLINE vec looked_up(vec table, words w) { return _mm512_permutexvar_ps(w, table); } /* only the lowest four bits count */
INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE four add_lanes(vec a, vec b, vec c, vec d) {
  vec ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  vec cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  vec abcd = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  abcd = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0x4e)); /* each quarter has four lanes of a, of b, ... */
  abcd = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0xb1));
  __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, abcd));
}

#elif defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
enum { LANES = 8, ROWS = 3, ROUNDED_ROWS = 4 };
typedef __m256 vec;
typedef __m128 four;
#define KEEP(v) __asm__("" : "+x"(v))
#define REST() _mm_pause()
INLINE vec load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store(float *to, vec v) { _mm256_storeu_ps(to, v); }
INLINE void store_four(float *to, four v) { _mm_storeu_ps(to, v); }
INLINE vec all(float number) { return _mm256_set1_ps(number); }
INLINE vec fma_(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec times(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec float16s(const void *at) { return _mm256_cvtph_ps(_mm_loadu_si128(at)); }
INLINE void store_float16s(void *to, vec v) { _mm_storeu_si128(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
INLINE vec bytes(const void *at) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at))); }
INLINE vec bfloat16s(const void *at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
}
typedef __m256i words;
INLINE words load_words(const void *at) { return _mm256_loadu_si256(at); }
INLINE words shifted(words w) { return _mm256_srli_epi32(w, 4); }
INLINE vec nibbles(words w) { return _mm256_cvtepi32_ps(_mm256_and_si256(w, _mm256_set1_epi32(15))); }
INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE four add_lanes(vec a, vec b, vec c, vec d) {
  vec ac = _mm256_add_ps(_mm256_blend_ps(a, c, 0xf0), _mm256_permute2f128_ps(a, c, 0x21)); /* four of a, of c */
  vec bd = _mm256_add_ps(_mm256_blend_ps(b, d, 0xf0), _mm256_permute2f128_ps(b, d, 0x21));
  vec abcd = _mm256_add_ps(_mm256_blend_ps(ac, bd, 0xcc), _mm256_shuffle_ps(ac, bd, 0x4e)); /* two of a, of b, ... */
  return _mm_hadd_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

#elif defined(__aarch64__)

#include <arm_neon.h>
enum { LANES = 4, ROWS = 6, ROUNDED_ROWS = 4 };
typedef float32x4_t vec, four;
#define KEEP(v) __asm__("" : "+w"(v))
#define REST() __asm__ volatile("yield")
INLINE vec load(const float *from) { return vld1q_f32(from); }
INLINE void store(float *to, vec v) { vst1q_f32(to, v); }
INLINE void store_four(float *to, four v) { vst1q_f32(to, v); }
INLINE vec all(float number) { return vdupq_n_f32(number); }
INLINE vec fma_(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
INLINE vec add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec times(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec float16s(const void *at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
INLINE void store_float16s(void *to, vec v) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
INLINE vec bfloat16s(const void *at) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16)); }
INLINE vec bytes(const void *at) {
  uint32x2_t four_bytes = vld1_dup_u32(at);
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes)))));
}
typedef uint32x4_t words;
INLINE words load_words(const void *at) { return vld1q_u32(at); }
INLINE words shifted(words w) { return vshrq_n_u32(w, 4); }
INLINE vec nibbles(words w) { return vcvtq_f32_u32(vandq_u32(w, vdupq_n_u32(15))); }
INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE vec halves_of(vec a, vec b) { /* two of a, two of b */
  return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)), vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
}
INLINE four add_lanes(vec a, vec b, vec c, vec d) { return vpaddq_f32(halves_of(a, b), halves_of(c, d)); }

#else /* any other processor */

enum { LANES = 4, ROWS = 3, ROUNDED_ROWS = 4 };
typedef float vec __attribute__((vector_size(16), aligned(4), may_alias));
typedef vec four;
#define KEEP(v)
#define REST()
INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec v) { *(vec *)to = v; }
INLINE void store_four(float *to, four v) { *(four *)to = v; }
INLINE vec all(float number) { return (vec){number, number, number, number}; }
#ifdef __FP_FAST_FMAF
INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE vec fma_(vec a, vec b, vec c) {
  return (vec){fma_one(a[0], b[0], c[0]), fma_one(a[1], b[1], c[1]), fma_one(a[2], b[2], c[2]), fma_one(a[3], b[3], c[3])};
}
#else /* two roundings instead of one, so the bits differ from all other processors */
INLINE float fma_one(float a, float b, float c) { return a * b + c; }
INLINE vec fma_(vec a, vec b, vec c) { return a * b + c; }
#endif
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec times(vec a, vec b) { return a * b; }
INLINE vec float16s(const void *from) {
  const uint16_t *at = from;
  return (vec){float16(at[0]), float16(at[1]), float16(at[2]), float16(at[3])};
}
INLINE void store_float16s(void *to, vec v) {
  for (int i = 0; i < LANES; i++) ((uint16_t *)to)[i] = to_float16(v[i]);
}
INLINE vec bfloat16s(const void *from) {
  const uint16_t *at = from;
  return (vec){bfloat16(at[0]), bfloat16(at[1]), bfloat16(at[2]), bfloat16(at[3])};
}
INLINE vec bytes(const void *from) {
  const uint8_t *at = from;
  return (vec){at[0], at[1], at[2], at[3]};
}
typedef uint32_t words __attribute__((vector_size(16), aligned(4), may_alias));
INLINE words load_words(const void *at) { return *(const words *)at; }
INLINE words shifted(words w) { return w >> 4; }
INLINE vec nibbles(words w) { return (vec){w[0] & 15, w[1] & 15, w[2] & 15, w[3] & 15}; }

INLINE float halves_of(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE four add_lanes(vec a, vec b, vec c, vec d) { return (four){halves_of(a), halves_of(b), halves_of(c), halves_of(d)}; }

#endif

enum { PARTS = ORDER / LANES };
typedef int32_t ints __attribute__((vector_size(4 * LANES))); /* also the result of a comparison: all bits of a lane set, or none */
static long at_most(long number, long limit) { return number < limit ? number : limit; }

/* --- packed weights ----------------------------------------------------------------------------------------------------

   MLX multiplies only float32 matrices, and never reads them: it passes an address to us. So a packed matrix claims to be
   float32. At its address there is a `Packed`, followed by the weights.

   Weights of 16 and 8 bits are stored as in the file. Weights of 4 bits are stored in blocks, so that unpacking LANES of
   them takes a single shift. A block is 128 weights, in 16 words: the first 16 weights are the lowest four bits of the
   words, the next 16 weights are the four bits above, and so on. (The index of each weight:)

       as in a file    7 6 5 4 3 2 1 0   15 14 13 12 11 10 9 8   23 ...
       in a block      112 96 80 64 48 32 16 0   113 97 81 65 49 33 17 1   114 ...

   How a `Packed` is told apart from numbers: it begins with a random key of 128 bits, drawn when this library is loaded.
   So there is no list of addresses to maintain: a matrix counts as packed for exactly as long as its memory holds the key.
   The key begins with a NaN, which is compared first and separately, because a matrix of one number has only four bytes.

   A form may also be an operation. Then there is no matrix after the `Packed`; a norm's weights follow it. */

enum { FLOAT32, FLOAT16, BFLOAT16, FOUR_BITS, EIGHT_BITS, /* forms of numbers; */
       ROUNDED_4, ROUNDED_5, ROUNDED_6, ROUNDED_8, ROUNDED_MXFP4, /* weights for 8-bit activations, by their bits; */
       SOFTMAX, SWIGLU, GEGLU, NORM, CAP, ATTENTION, DELTA, SIGLU, MEMORY, EXPERTS, TURN, TO_FLOAT16 }; /* operations */

typedef struct {
  uint64_t key[2];
  int32_t form, form_of_scales; /* of the weights; of scales and offsets */
  int64_t N, K;                 /* the matrix is (N, K), row by row */
  int32_t group, groups;        /* weights that share a scale and an offset; groups in a row. With 16 bits a row is one
                                   group, without an offset */
  int32_t shift;                /* a weight's group in its row: k >> shift */
  int32_t scales, offsets;      /* their positions, in cache lines from here */
  float setting;                /* the scale of a softmax, the eps of a norm, the size of a head; for a matrix, if not 0, each offset is its
                                   scale times this power of two, and no offsets are stored */
} Packed;
enum { LINE_NBYTES = 64, BLOCK = 8 * ORDER };
_Static_assert(sizeof(Packed) <= LINE_NBYTES, "the weights begin after it");

static uint64_t key[2];

static __attribute__((constructor)) void draw_key(void) {
  if (getentropy(key, sizeof key)) {
    fprintf(stderr, "nanobatch: the system has no random numbers\n");
    abort();
  }
  key[0] |= 0x7fc000007fc00000; /* both halves are NaN */
}

INLINE const Packed *packed_at(const void *at) {
  return memcmp(at, key, sizeof(float)) || memcmp(at, key, sizeof key) ? NULL : at;
}
INLINE int is_operation(const Packed *a) { return a && a->form >= SOFTMAX; }
INLINE int is_rounded(const int form) { return ROUNDED_4 <= form && form <= ROUNDED_MXFP4; }
INLINE const char *line(const Packed *a, long count) { return (const char *)a + count * LINE_NBYTES; }
INLINE long bits_of(const int form) {
  if (form == FOUR_BITS || form == ROUNDED_4 || form == ROUNDED_MXFP4) return 4;
  return form == ROUNDED_5 ? 5 : form == ROUNDED_6 ? 6 : form == EIGHT_BITS || form == ROUNDED_8 ? 8 : form == FLOAT32 ? 32 : 16;
}

/* Bytes of a row. With 4 bits a row is padded to whole blocks. */
INLINE long row_nbytes(long K, const int form) {
  return form == FOUR_BITS ? (K + BLOCK - 1) / BLOCK * BLOCK / 2 : K * bits_of(form) / 8;
}

/* Scales and offsets are converted to float32 first, GROUPS at a time. (There is memory for another vector after the last
   of them.) */
enum { GROUPS = 64 };
typedef struct {
  float scale[GROUPS], offset[GROUPS];
} Factors;

INLINE vec widen(const void *from, long i, const int form) {
  if (form == FLOAT16) return float16s((const uint16_t *)from + i);
  if (form == BFLOAT16) return bfloat16s((const uint16_t *)from + i);
  return load((const float *)from + i);
}

/* 8-bit factors: in each row, a byte for each group, which stands for the byte minus 128, and then a float16 number for
   each SPAN weights, by which their bytes are multiplied. K is then a multiple of SPAN, and weights have at most six bits,
   so a scale times a weight is exact. */
enum { SPAN = 256 };
INLINE long factor_nbytes(const Packed *a) { return a->form_of_scales == EIGHT_BITS ? 1 : a->form_of_scales == FLOAT32 ? 4 : 2; }
INLINE long factors_nbytes(const Packed *a) { /* of a row */
  return a->groups * factor_nbytes(a) + (a->form_of_scales == EIGHT_BITS ? 2 * (a->K / SPAN) : 0);
}

static NOINLINE void widen_bytes(const Packed *a, const char *from, long first, long count, float *to) {
  const long groups = a->groups, shares = groups * a->group / SPAN, shift = __builtin_ctz(SPAN) - a->shift;
  const long row = first / groups, g = first % groups;
  from += row * (groups + 2 * shares);
  const uint16_t *sizes = (const uint16_t *)(from + groups);
  for (long i = g; i < g + count; i += LANES, to += LANES) {
    float size[2 * LANES];
    store(size, all(float16(sizes[i >> shift])));
    if (1 << shift < LANES) store(size + LANES / 2, all(float16(sizes[(i >> shift) + 1])));
    store(to, times(add(bytes(from + i), all(-128)), load(size)));
  }
}

static NOINLINE void widen_all(const Packed *a, const char *from, long first, long count, float *to) {
  if (a->form_of_scales == EIGHT_BITS) widen_bytes(a, from, first, count, to);
  else for (long i = 0; i < count; i += LANES) store(to + i, widen(from, first + i, a->form_of_scales));
}

INLINE void read_factors(const Packed *a, long first, long count, Factors *to, const int form) {
  widen_all(a, line(a, a->scales), first, count, to->scale);
  if (bits_of(form) == 16) return;
  if (a->setting == 0) widen_all(a, line(a, a->offsets), first, count, to->offset);
  for (long i = 0; a->setting != 0 && i < count; i += LANES)
    store(to->offset + i, times(load(to->scale + i), all(a->setting)));
}

typedef struct { /* values shared by the weights of a group */
  vec scale, offset, table;
} Group;

INLINE Group group_of(const Factors *factors, long i, const int form) {
  Group group = {.scale = all(factors->scale[i])};
  if (bits_of(form) < 16) group.offset = all(factors->offset[i]);
#ifdef HAS_TABLE
  if (form == FOUR_BITS) group.table = add(times(sixteen(), group.scale), group.offset);
#endif
  return group;
}

/* Multiply by the scale and add the offset, with two roundings as in `mx.dequantize`. If the scale has 16 bits, the
   product is `exact`, so a fused multiply-add gives the same result. */
INLINE vec scaled(vec numbers, const Group *group, const int exact) {
  if (exact) return fma_(numbers, group->scale, group->offset);
  return add(times(numbers, group->scale), group->offset);
}

/* The next LANES weights of a row: with 4 bits from what is `left` of a block, otherwise from memory `at`. */
INLINE vec next(const Group *group, words *left, const char *at, const int form, const int exact) {
  if (form == EIGHT_BITS) return scaled(bytes(at), group, exact);
  if (form == FLOAT16) return times(float16s(at), group->scale);
  if (form == BFLOAT16) return times(bfloat16s(at), group->scale);
  words now = *left;
  *left = shifted(now);
#ifdef HAS_TABLE
  return looked_up(group->table, now);
#else
  return scaled(nibbles(now), group, exact);
#endif
}

/* The number of weights that are prepared at once: a group, or one block of a larger group. */
INLINE long step_of(const Packed *a, const int form) {
  return form == FOUR_BITS && a->group > BLOCK ? BLOCK : a->group;
}

/* One 16-bit weight, for the rest of a row after its last whole vector. */
INLINE float one_unpacked(const Packed *a, long j, long k, const int form) {
  uint16_t bits = ((const uint16_t *)line(a, 1))[j * a->K + k];
  return (form == FLOAT16 ? float16(bits) : bfloat16(bits)) * ((const float *)line(a, a->scales))[j];
}

/* --- a tile: up to ROWS rows of the result and COLS vectors of each, all in registers -------------------------------- */

typedef struct Runs Runs; /* `experts.c` */
typedef struct { /* y = alpha x W + beta y */
  long M, N, K;  /* x is (M, K), the result (M, N) */
  const float *x, *w;
  float *y;
  long ldx, ldw, ldy; /* numbers from a row to the next, of x, of w and of y */
  float alpha, beta;
  int is_turned; /* w is (K, N) instead of (N, K) */
  const Packed *packed; /* the header at w, if w is packed */
  void *strips;         /* x in the order in which tiles read it, float32 or rounded to 8 bits */
  float *steps;         /* for rounded x: the step of each part, and the step times the part's sum, (M, parts, 2) */
  int makes_strips;     /* true while the strips are being written */
  const long *tiles;     /* attention: the first row of each tile, then M */
  long tile_count;
  const Runs *runs;      /* experts: which rows each of them multiplies */
} Product;

INLINE int form_of(const Product *p) { return p->packed ? p->packed->form : FLOAT32; }
INLINE int is_plain(const Product *p) { return p->alpha == 1 && p->beta == 0; }

INLINE void put(const Product *p, long m, long j, float sum) {
  float *y = p->y + m * p->ldy + j;
  *y = p->beta ? fma_one(p->alpha, sum, p->beta * *y) : p->alpha * sum; /* with a beta of 0, y may be uninitialized */
}

INLINE void load_x(const float *x, long ldx, vec own[ROWS], const int rows) {
  for (int r = 0; r < rows; r++) {
    own[r] = load(x + r * ldx);
    KEEP(own[r]);
  }
}

/* The sums of a tile, in PARTS. The sums of one row fit into registers (except with 4-bit weights, whose unpacking needs
   registers itself). For more rows, each part in turn is in registers while a PIECE of W is read. The piece stays in the L1
   cache for all parts, and the last part prefetches the next piece. So the L2 cache is read evenly, not in bursts. */
typedef vec Sums[PARTS][ROWS][COLS];
enum { PIECE = 256, PACKED_PIECE = 4096, AHEAD = COLS / PARTS };

INLINE int together(const int rows, const int form) { return rows == 1 && form != FOUR_BITS ? PARTS : 1; }

INLINE void copy(vec (*from)[ROWS][COLS], vec (*to)[ROWS][COLS], const int parts, const int rows, const int cols) {
#pragma GCC unroll 4
  for (int i = 0; i < parts; i++)
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int c = 0; c < cols; c++) to[i][r][c] = from ? from[i][r][c] : all(0);
}

INLINE void add_parts(Sums sums, const int rows, const int cols) {
#pragma GCC unroll 2
  for (int half = PARTS / 2; half; half /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < half; i++)
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sums[i][r][c] = add(sums[i][r][c], sums[i + half][r][c]);
}

INLINE four add_columns(const vec sum[COLS], const int cols) { /* COLS, or one */
  return add_lanes(sum[0], sum[cols == COLS ? 1 : 0], sum[cols == COLS ? 2 : 0], sum[cols == COLS ? 3 : 0]);
}

/* Add the products k..end of float32 weights w to a tile's sums, from `part` on: `after` = `before` + products. Weights
   are prefetched so that memory is never idle: the next COLS columns, or, if W is read in pieces, the next piece. */
INLINE void add_numbers(const Product *p, const float *x, const float *w, long k, long end, const int part,
                        vec (*before)[ROWS][COLS], vec (*after)[ROWS][COLS], const int rows, const int cols) {
  const int parts = together(rows, FLOAT32);
  const long ahead = end + PIECE <= p->K ? PIECE : COLS * p->ldw - end + PIECE;
  Sums sum;
  copy(before, sum, parts, rows, cols);
  for (; k < end; k += ORDER)
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++) {
      const int lane = (part + i) * LANES;
      vec own[ROWS];
      load_x(x + k + lane, p->ldx, own, rows);
#pragma GCC unroll 4
      for (int c = 0; c < cols; c++) {
        vec weights = load(w + c * p->ldw + k + lane);
        KEEP(weights);
        if (parts < PARTS && part == PARTS - 1) __builtin_prefetch(w + c * p->ldw + k + ahead);
        if (parts == PARTS && c < AHEAD) __builtin_prefetch(w + (c + COLS + i * AHEAD) * p->ldw + k);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sum[i][r][c] = fma_(own[r], weights, sum[i][r][c]);
      }
    }
  copy(sum, after, parts, rows, cols);
}

/* The same with packed weights, from column j on; `factors` begin with group g. Rows of W are prefetched two tiles ahead. */
INLINE void add_packed(const Product *p, const float *x, long j, const Factors factors[COLS], long g, long k, long end,
                       const int part, vec (*before)[ROWS][COLS], vec (*after)[ROWS][COLS], const int rows, const int cols,
                       const int form) {
  const Packed *a = p->packed;
  const long bits = bits_of(form), width = row_nbytes(p->K, form), step = step_of(a, form);
  const int exact = a->form_of_scales != FLOAT32, shift = a->shift, parts = together(rows, form);
  const char *at = line(a, 1) + j * width + k * bits / 8;
  words left[PARTS][COLS];
  Sums sum;
  copy(before, sum, parts, rows, cols);
  while (k < end) {
    long stop = at_most(k + step, end);
    Group groups[COLS];
#pragma GCC unroll 4
    for (int c = 0; c < cols; c++) {
      groups[c] = group_of(&factors[c], (k >> shift) - g, form);
      if (parts == PARTS || c < AHEAD) __builtin_prefetch(at + (c + 2 * COLS + part * AHEAD) * width);
#pragma GCC unroll 4
      for (int i = 0; i < parts; i++)
        if (form == FOUR_BITS && k % BLOCK == 0) left[i][c] = load_words(at + c * width + (part + i) * LANES * 4);
    }
    if (form == FOUR_BITS && k % BLOCK == 0) at += BLOCK / 2;
#pragma GCC unroll 4
    for (; k < stop; k += ORDER) {
#pragma GCC unroll 4
      for (int i = 0; i < parts; i++) {
        const int lane = (part + i) * LANES;
        vec own[ROWS];
        load_x(x + k + lane, p->ldx, own, rows);
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
          if (bits == 16 && c < AHEAD) __builtin_prefetch(at + (c + COLS + (part + i) * AHEAD) * width);
          vec weights = next(&groups[c], &left[i][c], at + c * width + lane * bits / 8, form, exact);
          KEEP(weights);
#pragma GCC unroll 6
          for (int r = 0; r < rows; r++) sum[i][r][c] = fma_(own[r], weights, sum[i][r][c]);
        }
      }
      if (form != FOUR_BITS) at += ORDER * bits / 8;
    }
  }
  copy(sum, after, parts, rows, cols);
}

/* Write `cols` numbers of row m of the result, from column j on: add the last K % ORDER products to their sums one by one. */
INLINE void put_row(const Product *p, long m, long j, four sums, const long cols, const int form) {
  const float *x = p->x + m * p->ldx;
  const long whole = p->K / ORDER * ORDER;
  if (cols == COLS && whole == p->K && is_plain(p)) {
    store_four(p->y + m * p->ldy + j, sums);
    return;
  }
  float total[COLS];
  store_four(total, sums);
  for (int c = 0; c < cols; c++) {
    for (long k = whole; k < p->K; k++) {
      float weight = form == FLOAT32 ? p->w[(j + c) * p->ldw + k] : one_unpacked(p->packed, j + c, k, form);
      total[c] = fma_one(x[k], weight, total[c]);
    }
    put(p, m, j + c, total[c]);
  }
}

/* W as stored: compute `cols` columns of the result from j on, for `rows` rows from m on. `form` is the weights' form. */
INLINE void stored_tile(const Product *p, long m, long j, const int rows, const int cols, const int form) {
  const float *x = p->x + m * p->ldx;
  const float *w = p->w + j * p->ldw;
  const long whole = p->K / ORDER * ORDER;
  const int parts = together(rows, form);
  const long piece = parts == PARTS ? p->K : form == FLOAT32 ? PIECE : PACKED_PIECE;
  Sums sums;
  if (!whole) copy(NULL, sums, PARTS, rows, cols);

  for (long k = 0, end; k < whole; k = end) {
    if (form == FLOAT32) {
      end = at_most(k + piece, whole);
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i += parts)
        add_numbers(p, x, w, k, end, i, k ? &sums[i] : NULL, &sums[i], rows, cols);
    } else {
      const Packed *a = p->packed;
      const long g = k >> a->shift;
      Factors factors[COLS];
      end = at_most((g + GROUPS) << a->shift, at_most(k + piece, whole));
      for (int c = 0; c < cols; c++)
        read_factors(a, (j + c) * a->groups + g, at_most(GROUPS, a->groups - g), &factors[c], form);
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i += parts)
        add_packed(p, x, j, factors, g, k, end, i, k ? &sums[i] : NULL, &sums[i], rows, cols, form);
    }
  }

  add_parts(sums, rows, cols);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) put_row(p, m + r, j, add_columns(sums[0][r], cols), cols, form);
}

/* W turned: compute `cols` vectors of columns, from column j on. For a single row, WIDEST vectors fit into registers. */
INLINE long turned_tile(const Product *p, long m, long j, const int rows, const int cols) {
  const float *x = p->x + m * p->ldx;
  const float *w = p->w + j;
  vec sum[ROWS][WIDEST];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < cols; c++) sum[r][c] = all(0);

  for (long k = 0; k < p->K; k++, w += p->ldw) {
    vec own[ROWS];
    for (int r = 0; r < rows; r++) {
      own[r] = all(x[r * p->ldx + k]);
      KEEP(own[r]);
    }
    for (int c = 0; c < cols; c++) {
      vec weights = load(w + c * LANES);
      KEEP(weights);
      for (int r = 0; r < rows; r++) sum[r][c] = fma_(own[r], weights, sum[r][c]);
    }
  }

  for (int r = 0; r < rows; r++)
    for (int c = 0; c < cols; c++) {
      if (is_plain(p)) {
        store(p->y + (m + r) * p->ldy + j + c * LANES, sum[r][c]);
        continue;
      }
      float total[LANES];
      store(total, sum[r][c]);
      for (int i = 0; i < LANES; i++) put(p, m + r, j + c * LANES + i, total[i]);
    }
  return cols;
}

/* W turned, with fewer columns left than a vector has: the same sum for a single number. */
static void turned_number(const Product *p, long m, long j) {
  float total = 0;
  for (long k = 0; k < p->K; k++) total = fma_one(p->x[m * p->ldx + k], p->w[k * p->ldw + j], total);
  put(p, m, j, total);
}

/* --- strips: tiles of the same rows side by side ------------------------------------------------------------------------

   A tile's loops are unrolled into registers only if their bounds are constants. So there is a function for each height.
   Strips of packed weights have at most LOW rows, because the groups need registers, too. Up to FEW rows, reading the
   weights again for each strip takes less time than copying them once (as measured). */

INLINE void stored_strip(const Product *p, long m, long j, long to, const int rows, const int form) {
  for (; j + COLS <= to; j += COLS) stored_tile(p, m, j, rows, COLS, form);
  for (; j < to; j++) stored_tile(p, m, j, rows, 1, form);
}

/* Compute up to `cols` vectors of columns: at most 4, or 8 for a single row. Returns the number computed. */
INLINE long turned_tile_of(const Product *p, long m, long j, long cols, const int rows) {
  if (rows == 1 && cols >= 8) return turned_tile(p, m, j, rows, 8);
  if (rows == 1 && cols >= 6) return turned_tile(p, m, j, rows, 6);
  if (cols >= 4) return turned_tile(p, m, j, rows, 4);
  if (cols == 3) return turned_tile(p, m, j, rows, 3);
  if (cols == 2) return turned_tile(p, m, j, rows, 2);
  return turned_tile(p, m, j, rows, 1);
}

typedef void Strip(const Product *p, long m, long j, long to);
typedef long Tile(const Product *p, long m, long j, long cols);
#define STORED(form, rows) \
  static NOINLINE void form##rows(const Product *p, long m, long j, long to) { stored_strip(p, m, j, to, rows, form); }
#define HEIGHT(rows)                                                               \
  STORED(FLOAT32, rows)                                                            \
  static NOINLINE long turned##rows(const Product *p, long m, long j, long cols) { \
    return turned_tile_of(p, m, j, cols, rows);                                    \
  }

HEIGHT(1) HEIGHT(2) HEIGHT(3)
#if defined(__AVX512F__) || defined(__aarch64__)
HEIGHT(4) HEIGHT(5) HEIGHT(6)
#define HEIGHTS(kind) {0, kind##1, kind##2, kind##3, kind##4, kind##5, kind##6}
enum { LOW = 4, FEW = 20, FEW_OF_FOUR_BITS = 20, FEW_OF_FLOATS = 20 };
#define PACKEDS(form) STORED(form, 1) STORED(form, 2) STORED(form, 3) STORED(form, 4)
#define LOWS(kind) {0, kind##1, kind##2, kind##3, kind##4}
#else
#define HEIGHTS(kind) {0, kind##1, kind##2, kind##3}
enum { LOW = ROWS, FEW = 4, FEW_OF_FOUR_BITS = 1, FEW_OF_FLOATS = 15 };
#define PACKEDS(form) STORED(form, 1) STORED(form, 2) STORED(form, 3)
#define LOWS HEIGHTS
#endif
PACKEDS(FLOAT16) PACKEDS(BFLOAT16) PACKEDS(FOUR_BITS) PACKEDS(EIGHT_BITS)
static Strip *const stored_strips[][ROWS + 1] = {
  [FLOAT32] = HEIGHTS(FLOAT32), [FLOAT16] = LOWS(FLOAT16), [BFLOAT16] = LOWS(BFLOAT16),
  [FOUR_BITS] = LOWS(FOUR_BITS), [EIGHT_BITS] = LOWS(EIGHT_BITS),
};
static Tile *const turned_tiles[] = HEIGHTS(turned);
_Static_assert(sizeof turned_tiles / sizeof *turned_tiles == ROWS + 1, "a function for each height");

/* The number of rows in the next strip if `left` remain: 7 are split as 4 + 3, not 6 + 1. */
static long next_height(long left, long most) {
  long strips = (left + most - 1) / most;
  return (left + strips - 1) / strips;
}

/* W turned: compute rows m0..m1 and columns j0..j1. */
static void turned_block(const Product *p, long m0, long m1, long j0, long j1) {
  long whole = j0 + (j1 - j0) / LANES * LANES;
  for (long m = m0, rows; m < m1; m += rows) {
    rows = next_height(m1 - m, ROWS);
    for (long j = j0; j < whole;) j += LANES * turned_tiles[rows](p, m, j, (whole - j) / LANES);
  }
  for (long m = m0; m < m1; m++)
    for (long j = whole; j < j1; j++) turned_number(p, m, j);
}

/* --- W as stored: few rows and many -------------------------------------------------------------------------------------

   For few rows, each strip reads the weights in place, and unpacks them again. For more rows, some columns are copied or
   unpacked into a panel that stays in the L1 cache, and all strips use it. A panel is stored in the order in which a tile
   reads it: for each part of the sums, LANES numbers of each column, then the next LANES of each. Before that, x is copied
   into strips in the same order. Then a tile reads two streams. (The rows of a matrix are often a multiple of 4 KiB apart,
   so numbers that are read together would share one set of the L1 cache: with AVX2 the loop is three times as slow.)

   If K is long, a panel covers a part of it, so that the L2 cache holds the same part of x for many rows. Between panels
   the sums so far are kept, lane by lane. */

enum {
  WIDE = 5120, /* float32 weights (20 KiB) that stay in the L1 cache while all strips use them; */
  NARROW = 16, /* for packed weights: this many columns */
  DEEP = 1024, /* numbers of a row in a panel: whole blocks, and at most GROUPS groups */
  TALL = 72,   /* rows that share a panel: whole strips */
};

typedef struct {
  long j, cols;   /* columns of the result; copies of the last column fill the last tile */
  long k, depth;  /* the numbers k..k + depth of each column */
  float *weights; /* tile by tile */
} Panel;

INLINE float *column(const Panel *panel, long c) {
  return panel->weights + c / COLS * COLS * panel->depth + c % COLS * LANES;
}

INLINE void unpack_as(const Packed *a, const Panel *panel, const int form) {
  const long bits = bits_of(form), width = row_nbytes(a->K, form), step = step_of(a, form);
  const int exact = a->form_of_scales != FLOAT32, shift = a->shift;
  const long k0 = panel->k, k1 = k0 + panel->depth, g = k0 >> shift, count = ((k1 - 1) >> shift) + 1 - g;
  for (long c = 0; c < panel->cols; c++) {
    const long j = at_most(panel->j + c, a->N - 1);
    const char *at = line(a, 1) + j * width + k0 * bits / 8;
    const long ahead = panel->cols * width; /* the weights of the next panel */
    float *to = column(panel, c);
    const long part = panel->depth / ORDER * COLS * LANES;
    Factors factors;
    words left[PARTS] = {0};
    read_factors(a, j * a->groups + g, count, &factors, form);
    for (long k = k0; k < k1;) {
      long stop = at_most(k + step, k1);
      Group group = group_of(&factors, (k >> shift) - g, form);
      __builtin_prefetch(at + ahead);
      if (form == FOUR_BITS && k % BLOCK == 0) {
        for (int i = 0; i < PARTS; i++) left[i] = load_words(at + i * LANES * 4);
        at += BLOCK / 2;
      }
#pragma GCC unroll 8
      for (; k < stop; k += ORDER, to += COLS * LANES) {
        if (bits == 16) __builtin_prefetch(at + ahead);
        for (int i = 0; i < PARTS; i++)
          store(to + i * part, next(&group, &left[i], at + i * LANES * bits / 8, form, exact));
        if (form != FOUR_BITS) at += ORDER * bits / 8;
      }
    }
  }
}

/* Copy `depth` numbers of a row to their places in a panel or strip of `width` rows; prefetch the numbers `ahead`. */
INLINE void arrange(const float *from, long depth, float *to, const long width, long ahead) {
  for (long k = 0; k < depth; k += ORDER, to += width * LANES) {
    __builtin_prefetch(from + k + ahead);
    for (int i = 0; i < PARTS; i++) store(to + i * depth / ORDER * width * LANES, load(from + k + i * LANES));
  }
}

static NOINLINE void unpack(const Product *p, const Panel *panel) {
  const Packed *a = p->packed;
  for (long c = 0; !a && c < panel->cols; c++) {
    const float *from = p->w + at_most(panel->j + c, p->N - 1) * p->ldw + panel->k;
    arrange(from, panel->depth, column(panel, c), COLS, panel->cols * p->ldw);
  }
  if (!a) return;
  if (a->form == FLOAT16) unpack_as(a, panel, FLOAT16);
  if (a->form == BFLOAT16) unpack_as(a, panel, BFLOAT16);
  if (a->form == FOUR_BITS) unpack_as(a, panel, FOUR_BITS);
  if (a->form == EIGHT_BITS) unpack_as(a, panel, EIGHT_BITS);
}

/* The number of rows in the strip that begins with row m. */
static long height(const Product *p, long m) { return next_height(at_most(TALL - m % TALL, p->M - m), ROWS); }

/* Copy x into the strips that begin in rows m0..m1: the first panel's part for all strips, then the next panel's. */
static void make_strips(const Product *p, long m0, long m1) {
  const long whole = p->K / ORDER * ORDER;
  for (long m = 0, rows; m < m1; m += rows) {
    rows = height(p, m);
    for (long deep = 0, depth; deep < whole && m >= m0; deep += depth) {
      depth = at_most(DEEP, whole - deep);
      float *to = (float *)p->strips + deep * p->M + m * depth;
      for (long r = 0; r < rows; r++) arrange(p->x + (m + r) * p->ldx + deep, depth, to + r * LANES, rows, rows * p->ldx);
    }
  }
}

/* Add the products of a panel to the sums of a tile: `count` vectors of each row and column in each part. */
INLINE void add_panel(const float *x, const float *w, long count, Sums before, Sums after, const int rows,
                      const int is_first) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) {
    vec sum[1][ROWS][COLS];
    copy(is_first ? NULL : &before[i], sum, 1, rows, COLS);
    for (long k = 0; k < count; k++, x += rows * LANES, w += COLS * LANES) {
      vec own[ROWS];
      load_x(x, LANES, own, rows);
#pragma GCC unroll 4
      for (int c = 0; c < COLS; c++) {
        vec weights = load(w + c * LANES);
        KEEP(weights);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sum[0][r][c] = fma_(own[r], weights, sum[0][r][c]);
      }
    }
    copy(sum, &after[i], 1, rows, COLS);
  }
}

/* Multiply a strip by a panel: write the result, or update the sums in `kept` if there are further panels. */
INLINE void panel_strip(const Product *p, const Panel *panel, long m, Sums kept, const int rows, const int is_first) {
  const long depth = panel->depth, count = depth / ORDER, whole = p->K / ORDER * ORDER, ldy = p->ldy;
  const int is_usual = whole == p->K && is_plain(p) && panel->j + panel->cols <= p->N;
  const float *x = (const float *)p->strips + panel->k * p->M + m * depth;
  if (panel->k + depth < whole) {
    add_panel(x, panel->weights, count, kept, kept, rows, is_first);
    return;
  }
  for (long c = 0; c < panel->cols; c += COLS) {
    const long j = panel->j + c;
    float *y = p->y + m * ldy + j;
    Sums sums;
    add_panel(x, panel->weights + c * depth, count, kept, sums, rows, is_first);
    add_parts(sums, rows, COLS);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++, y += ldy) {
      four four_sums = add_columns(sums[0][r], COLS);
      if (is_usual) store_four(y, four_sums);
      else put_row(p, m + r, j, four_sums, at_most(COLS, p->N - j), form_of(p));
    }
  }
}

typedef void PanelStrip(const Product *p, const Panel *panel, long m, Sums kept);
#define PANEL(rows)                                                                       \
  static NOINLINE void panel##rows(const Product *p, const Panel *panel, long m, Sums kept) { \
    if (panel->k) panel_strip(p, panel, m, kept, rows, 0);                                \
    else panel_strip(p, panel, m, kept, rows, 1);                                         \
  }
PANEL(1) PANEL(2) PANEL(3)
#if defined(__AVX512F__) || defined(__aarch64__)
PANEL(4) PANEL(5) PANEL(6)
#endif
static PanelStrip *const panel_strips[] = HEIGHTS(panel);

static void multiply_few(const Product *p, long m0, long m1, long j0, long j1) {
  const int form = form_of(p);
  const long wide = form == FLOAT32 ? (WIDE / (p->K + 1) + COLS) / COLS * COLS : NARROW;
  for (long j = j0; j < j1; j += wide)
    for (long m = m0, rows; m < m1; m += rows) {
      rows = next_height(m1 - m, form == FLOAT32 ? ROWS : LOW);
      stored_strips[form][rows](p, m, j, at_most(j + wide, j1));
    }
}

static void multiply_many(const Product *p, long j0, long j1) {
  float weights[COLS * DEEP] __attribute__((aligned(64)));
  Sums kept[TALL];
  const long whole = p->K / ORDER * ORDER, wide = COLS * DEEP / at_most(whole, DEEP) / COLS * COLS;
  for (long m0 = 0; m0 < p->M; m0 += TALL)
    for (long j = j0; j < j1; j += wide)
      for (long k = 0; k < whole; k += DEEP) {
        const long cols = at_most(wide, (j1 - j + COLS - 1) / COLS * COLS);
        const Panel panel = {.j = j, .cols = cols, .k = k, .depth = at_most(DEEP, whole - k), .weights = weights};
        unpack(p, &panel);
        for (long m = m0, rows; m < at_most(m0 + TALL, p->M); m += rows) {
          rows = height(p, m);
          panel_strips[rows](p, &panel, m, kept[m - m0]);
        }
      }
}

/* --- activations in 8 bits ---------------------------------------------------------------------------------------------

   If W is packed in a ROUNDED form, each part of a row of x is quantized to integers a, -127 to 127, and a `step`, so that
   x is about a times step. A part is a group of W, or FINE numbers of a larger group, because one outlier makes the step
   coarse for the whole part. (With SmolLM2 in groups of 64, perplexity is 0.4 % above float arithmetic with parts of 32,
   and 0.9 % with parts of 64.) With w = scale q + offset, a part adds step scale (sum of q a) + step (sum of a) offset to
   the result. Sums of integers are exact in any order, so each processor uses its own instructions for them. What remains
   are four roundings for each part, always the same: here, too, a row's bits do not depend on the batch.

   W is stored in panels of 16 rows. A cache line has one word of each row, and a word has four weights of 8 bits, or eight
   of 4 bits: the first four of them in the lower halves of its bytes. Weights of 5 and 6 bits have their lower 4 bits in
   such lines. Another line follows, with the upper bits of all weights that fill it: together they are a UNIT. (Each number
   below is the index of four weights of a row, one in each byte of a word:)

       4 bits    8 weights   | 0, 1 |
       5 bits   32           | 0, 1 | 2, 3 | 4, 5 | 6, 7 | the fifth bit of 0, of 1, ... of 7 |
       6 bits   16           | 0, 1 | 2, 3 | the upper two bits of 0, of 1, of 2, of 3 |
       8 bits    8           | 0 | 1 |

   MXFP4 weights are stored like weights of 4 bits. The four bits are an index into a table of 15 different values from 0
   to 24.

   The 16 scales of a group are contiguous, and so are the 16 offsets. `dot` adds the products of four weights and four
   numbers of x to each lane of a `partial` sum. */

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
INLINE ints dot(ints sum, words w, const int8_t *x) { /* (with the intrinsic, GCC 12 copies registers) */
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int8_t(*)[4])x));
  return sum;
}
#define PLANES(form) 1
#elif defined(__AVXVNNI__)
#define PLANES(form) 1
INLINE ints dot(ints sum, words w, const int8_t *x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(_mm256_broadcastd_epi32(_mm_loadu_si32(x))));
  return sum;
}
#elif defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#if defined(__AVX512F__)
#define WIDE(name) _mm512_##name
#else
#define WIDE(name) _mm256_##name
#endif
typedef int16_t partial __attribute__((vector_size(4 * LANES)));
#define FULL(form, group) at_most((form) == ROUNDED_6 ? 8 : (form) == ROUNDED_5 || (form) == ROUNDED_MXFP4 ? 16 : 32, group) /* more overflow 16 bits */
INLINE ints whole(partial sum) { return (ints)WIDE(madd_epi16)((words)sum, WIDE(set1_epi16)(1)); }
INLINE partial dot(partial sum, words w, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  return sum + (partial)WIDE(maddubs_epi16)(w, WIDE(set1_epi32)(four));
}
#elif defined(__aarch64__)
INLINE ints dot(ints sum, words w, const int8_t *x) {
  const int8x16_t q = vreinterpretq_s8_u32(w), a = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)x));
#ifdef __ARM_FEATURE_DOTPROD
  return (ints)vdotq_s32((int32x4_t)sum, q, a);
#else
  return (ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(a)), vmull_high_s8(q, a)));
#endif
}
#else
INLINE ints dot(ints sum, words w, const int8_t *x) {
  for (int b = 0; b < 4; b++) sum += (ints)(w >> 8 * b & 255) * x[b];
  return sum;
}
#endif
#ifndef FULL
#define FULL(form, group) (group)
typedef ints partial;
INLINE ints whole(partial sum) { return sum; }
#endif
#ifndef PLANES
#define PLANES(form) ((form) == ROUNDED_8 ? 2 : 1)
#endif

enum { FINE = 32 };
INLINE long part_of(const Packed *a) { return at_most(FINE, a->group); }

/* Round rows of x into strips of ROUNDED_ROWS rows. A strip has four numbers of each row, then the next four of each. */
static void round_rows(const Product *p, long m0, long m1) {
  const long size = part_of(p->packed), parts = p->K / size;
  for (long m = m0; m < m1; m++)
    for (long part = 0; part < parts; part++) {
      const long r = m % ROUNDED_ROWS, first = m - r, rows = at_most(ROUNDED_ROWS, p->M - first);
      const float *x = p->x + m * p->ldx + part * size;
      float *step = p->steps + 2 * (first * parts + part * rows + r);
      int32_t bits[FINE], most = 0, sum = 0;
      int8_t numbers[FINE];
      memcpy(bits, x, size * sizeof *x);
      for (long i = 0; i < size; i++) { /* without signs, floats compare like their bits, and a NaN is the largest */
        const int32_t number = bits[i] & 0x7fffffff;
        most = number > most ? number : most;
      }
      const int is_usual = 0x1p-100f < of_bits(most) && most < 0x7f800000;
      const float inverse = is_usual ? 127 / of_bits(most) : 0;
      for (long i = 0; i < size; i++) {
        const float shifted = x[i] * inverse + 0x1.8p23f; /* so large that its last bits are the rounded integer */
        memcpy(bits + i, &shifted, sizeof shifted);
        sum += numbers[i] = (int8_t)bits[i];
      }
      int8_t *to = (int8_t *)p->strips + first * p->K + part * size * rows + 4 * r;
      for (long i = 0; i < size; i += 4) memcpy(to + i * rows, numbers + i, 4);
      step[0] = is_usual ? of_bits(most) / 127 : 0 * of_bits(most); /* a number that is not finite makes the row NaN */
      step[1] = step[0] * sum;
    }
}

/* The length of `steps` for a row. */
INLINE long steps_of(const Packed *a) { return 2 * (a->K / part_of(a)); }

/* MXFP4: the value of each code, 0 to 15. Minus 12, it is twice the value in the format's definition. */
static const uint8_t of_mxfp4[16] __attribute__((aligned(16))) = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX512BW__)
INLINE words looked_up_bytes(words w) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const void *)of_mxfp4)), w); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE words looked_up_bytes(words w) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const void *)of_mxfp4)), w); }
#elif defined(__aarch64__)
INLINE words looked_up_bytes(words w) { return vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(of_mxfp4), vreinterpretq_u8_u32(w))); }
#else
static NOINLINE words looked_up_bytes(words w) {
  uint8_t each[sizeof w];
  memcpy(each, &w, sizeof w);
  for (unsigned i = 0; i < sizeof w; i++) each[i] = of_mxfp4[each[i]];
  memcpy(&w, each, sizeof w);
  return w;
}
#endif

INLINE long unit_of(const int form) { return form == ROUNDED_5 ? 32 : form == ROUNDED_6 ? 16 : 8; }

/* The n-th four weights of each row of the unit `at`; with two planes, their lower or their upper halves. */
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
INLINE words weights_of(const char *at, const int n, const int form, const int plane) {
  const uints halves = (uints){0} + 0x0f0f0f0f;
  if (form == ROUNDED_8) {
    const uints w = (uints)load_words(at + n * LINE_NBYTES);
    return (words)(PLANES(form) == 1 ? w : (plane ? w >> 4 : w) & halves);
  }
  const uints w = (uints)load_words(at + n / 2 * LINE_NBYTES), low = (n % 2 ? w >> 4 : w) & halves;
  if (form == ROUNDED_4) return (words)low;
  if (form == ROUNDED_MXFP4) return looked_up_bytes((words)low);
  const uints upper = (uints)load_words(at + unit_of(form) / 8 * LINE_NBYTES);
  const int bit = form == ROUNDED_5 ? n : 2 * n; /* their position in each byte of `upper`; in the weight it is 4 */
  return (words)(low | ((bit < 4 ? upper << (4 - bit) : upper >> (bit - 4)) & (form == ROUNDED_5 ? 0x10101010 : 0x30303030)));
}

/* LANES of the 16 scales or offsets of a group, starting with c. With 8 bits, they are bytes times their `sizes`. */
INLINE vec factors_of(const char *at, const char *sizes, long c, const int form) {
  return form == EIGHT_BITS ? times(add(bytes(at + c), all(-128)), float16s(sizes + 2 * c)) : widen(at, c, form);
}

/* Add the products of the parts i0..i1 of x to the sums of `rows` rows and the 16 columns of a panel. To avoid overflow in 16
   bits, sums of FULL weights are added to 32-bit totals, and 8-bit weights are multiplied in two PLANES. */
INLINE void rounded_tile(const Product *p, long m, long panel, long i0, long i1, float *sums, const int rows, const int form,
                         const long part) {
  const Packed *a = p->packed;
  const long unit = unit_of(form), nbytes = unit * ORDER * bits_of(form) / 8;
  const long full = FULL(form, part), span = full > unit ? full : unit;
  const int planes = PLANES(form), is_summed_later = full >= unit;
  const char *at = line(a, 1) + (panel * p->K + i0 * part) * ORDER * bits_of(form) / 8;
  const int8_t *x = (const int8_t *)p->strips + m * p->K + i0 * part * rows;
  const float *step = p->steps + 2 * (m * (p->K / part) + i0 * rows);

  const int scales = a->form_of_scales;
  const long width = factor_nbytes(a), sizes = a->groups * ORDER; /* with 8 bits they follow the bytes */
  const long factors = panel * ORDER * factors_nbytes(a);
  const char *const scales_at = line(a, a->scales) + factors, *const offsets_at = line(a, a->offsets) + factors;

  vec own[ROUNDED_ROWS][PARTS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) own[r][c] = load(sums + r * ORDER + c * LANES);
  for (long i = i0; i < i1; i++, step += 2 * rows) {
    ints total[ROUNDED_ROWS][PARTS] = {0};
    for (long k = 0; k < part; k += span, x += span * rows, at += span / unit * nbytes)
#pragma GCC unroll 2
      for (int plane = 0; plane < planes; plane++) {
        partial sum[ROUNDED_ROWS][PARTS] = {0};
        for (long u = 0; u < span / unit; u++)
#pragma GCC unroll 8
          for (int n = 0; n < unit / 4; n++) {
            words w[PARTS];
#pragma GCC unroll 4
            for (int c = 0; c < PARTS; c++) w[c] = weights_of(at + u * nbytes + c * LANES * 4, n, form, plane);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
              for (int c = 0; c < PARTS; c++) {
                sum[r][c] = dot(sum[r][c], w[c], x + (u * unit + 4 * n) * rows + 4 * r);
                if (is_summed_later || (4 * n + 4) % full) continue;
                total[r][c] += whole(sum[r][c]);
                sum[r][c] = (partial){0};
              }
          }
        if (!is_summed_later) continue;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
          for (int c = 0; c < PARTS; c++) total[r][c] += whole(sum[r][c]) << 4 * plane;
      }
    const long k = i * part, factor = (k >> a->shift) * ORDER * width, size = sizes + k / SPAN * 2 * ORDER;
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) {
      const vec scale = factors_of(scales_at + factor, scales_at + size, c * LANES, scales);
      const vec offset = a->setting != 0 ? times(scale, all(a->setting))
                                         : factors_of(offsets_at + factor, offsets_at + size, c * LANES, scales);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const vec number = times(__builtin_convertvector(total[r][c], vec), all(step[2 * r]));
        own[r][c] = fma_(offset, all(step[2 * r + 1]), fma_(number, scale, own[r][c]));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) store(sums + r * ORDER + c * LANES, own[r][c]);
}

/* Pass the usual size of a part as a constant for one row, where the number of instructions limits the speed. */
INLINE void usual_tile(const Product *p, long m, long panel, long i0, long i1, float *sums, const int rows, const int form) {
  const long usual = form == ROUNDED_6 ? 16 : FINE, part = part_of(p->packed);
  if (rows == 1 && part == usual) rounded_tile(p, m, panel, i0, i1, sums, rows, form, usual);
  else rounded_tile(p, m, panel, i0, i1, sums, rows, form, part);
}

typedef void Rounded(const Product *p, long m, long panel, long i0, long i1, float *sums);
#define ROUNDED(form, rows)                                                                               \
  static NOINLINE void form##_##rows(const Product *p, long m, long panel, long i0, long i1, float *sums) { \
    usual_tile(p, m, panel, i0, i1, sums, rows, form);                                                    \
  }
#define ROUNDEDS(form) ROUNDED(form, 1) ROUNDED(form, 2) ROUNDED(form, 3) ROUNDED(form, 4)
#define TILES(form) 0, form##_1, form##_2, form##_3, form##_4
ROUNDEDS(ROUNDED_4) ROUNDEDS(ROUNDED_5) ROUNDEDS(ROUNDED_6) ROUNDEDS(ROUNDED_8) ROUNDEDS(ROUNDED_MXFP4)
#ifdef __AVX512F__
#define MORE(form) ROUNDED(form, 5) ROUNDED(form, 6) ROUNDED(form, 7) ROUNDED(form, 8)
MORE(ROUNDED_4) MORE(ROUNDED_5) MORE(ROUNDED_6) MORE(ROUNDED_8) MORE(ROUNDED_MXFP4)
#undef TILES
#define TILES(form) 0, form##_1, form##_2, form##_3, form##_4, form##_5, form##_6, form##_7, form##_8
#endif
static Rounded *const rounded_tiles[][ROUNDED_ROWS + 1] = {
  {TILES(ROUNDED_4)}, {TILES(ROUNDED_5)}, {TILES(ROUNDED_6)}, {TILES(ROUNDED_8)}, {TILES(ROUNDED_MXFP4)},
};

static void multiply_rounded(const Product *p, long j0, long j1) {
  const Packed *a = p->packed;
  const long size = part_of(a), parts = p->K / size;
  const long deep = p->M > ROUNDED_ROWS ? DEEP / size : parts; /* for many rows, the parts of W stay in the L1 cache */
  float sums[TALL * ORDER];
  for (long m0 = 0; m0 < p->M; m0 += TALL)
    for (long j = j0; j < j1; j += ORDER) {
      const long end = at_most(p->M, m0 + TALL);
      memset(sums, 0, sizeof sums);
      for (long i = 0; i < parts; i += deep)
        for (long m = m0; m < end; m += ROUNDED_ROWS)
          rounded_tiles[a->form - ROUNDED_4][at_most(ROUNDED_ROWS, end - m)](
            p, m, j / ORDER, i, at_most(i + deep, parts), sums + (m - m0) * ORDER);
      for (long m = m0; m < end; m++) memcpy(p->y + m * p->ldy + j, sums + (m - m0) * ORDER, at_most(ORDER, j1 - j) * sizeof *sums);
    }
}

/* --- operations of one row ---------------------------------------------------------------------------------------------

   MLX computes these number by number, each in several passes. Here they are written with the vector extensions of GCC and
   Clang, once for all processors. Each operation works on one row, x, and computes each of its sums in one order:

       SOFTMAX  y = e^(s x) / sum of e^(s x)               the largest x is subtracted from each first; s is the setting
       SWIGLU   y = g / (1 + e^-g) u                       the gate g is the first half of x, and u is the second
       GEGLU    y = g / (1 + e^-v) u                       v = sqrt(8 / pi) (g + 0.044715 g^3)
       SIGLU    y = 1 / (1 + e^-g) u
       NORM     y = x / sqrt(mean of x^2 + eps) weight     eps is the setting
       CAP      y = c tanh(x / c)                          c is the setting
       TURN     y = x cos + (b, a) sin, with x = (a, b)    RoPE: a row is a head, with Dh numbers, which is the setting; the
                                                           cos and the sin of each token lie where a norm has its weights
       TO_FLOAT16  y = x in float16                        or NaN, if x is out of its range

   The end of a row is padded to a whole vector, so each number is computed in the same way wherever it is. A softmax is
   padded with minus infinity, whose power is exactly 0. Masked scores have the power 0, too, so it makes no difference how
   far attention reads. A NaN makes its whole row NaN; in a gate, only its own number. */

typedef float halves __attribute__((vector_size(2 * LANES)));
typedef double doubles __attribute__((vector_size(4 * LANES))); /* LANES / 2 of them */

INLINE vec where(ints is_so, vec yes, vec no) { return (vec)((is_so & (ints)yes) | (~is_so & (ints)no)); }

INLINE vec load_some(const float *from, long count, float fill) {
  if (count >= LANES) return load(from);
  float some[LANES];
  for (long i = 0; i < LANES; i++) some[i] = i < count ? from[i] : fill;
  return load(some);
}

INLINE void store_some(float *to, long count, vec v) {
  if (count >= LANES) {
    store(to, v);
    return;
  }
  float some[LANES];
  store(some, v);
  for (long i = 0; i < count; i++) to[i] = some[i];
}

/* e^x is `number` times `scale`, and `over` is 1 / scale: a single float32 would lose digits below e^-87 and overflow above
   e^88. Beyond FAR, e^x counts as 0 or infinity: below -FAR even x e^x is smaller than any float32. */
enum { FAR = 110 };
typedef struct {
  vec number, scale, over;
} Power;

INLINE Power power(vec x) {
  const vec large = all(0x1.8p23f); /* so large that a sum with it is rounded to an integer */
  ints is_zero = x < all(-FAR), is_infinite = x > all(FAR);
  x = where(is_zero | is_infinite, all(0), x);
  vec shifted = fma_(x, all(0x1.715476p0f), large); /* e^x = 2^n e^rest, with n = x / ln 2, rounded */
  vec n = shifted - large;
  vec rest = fma_(n, all(-0x1.63p-1f), x); /* x - n ln 2, in two steps: n times the first constant is exact */
  rest = fma_(n, all(0x1.bd0106p-13f), rest);

  static const float terms[] = {1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1, 1};
  vec sum = all(terms[0]); /* becomes 1 + rest + rest^2 / 2! + ... + rest^7 / 7! */
#pragma GCC unroll 7
  for (int i = 1; i < 8; i++) sum = fma_(sum, rest, all(terms[i]));

  ints whole = (ints)shifted - (ints)large, half = whole >> 1, other = whole - half; /* 2^n as 2^half 2^other */
  vec number = sum * (vec)((127 + half) << 23);
  number = where(is_zero, all(0), where(is_infinite, all(__builtin_inff()), number));
  return (Power){number, (vec)((127 + other) << 23), (vec)((127 - other) << 23)};
}

/* The sum of numbers, or of their squares, in doubles. Each of eight partial sums adds every eighth number, so zeros at the
   end change nothing. */
INLINE double sum_of(const float *x, long count, const int squares) {
  enum { EIGHT = ORDER / 2, HALF = LANES / 2 };
  doubles sums[PARTS] = {0};
  for (long k = 0; k < count; k += EIGHT) {
    float some[EIGHT] = {0};
    const float *at = count - k >= EIGHT ? x + k : memcpy(some, x + k, (count - k) * sizeof *x);
    for (int i = 0; i < PARTS; i++) {
      halves half;
      memcpy(&half, at + i * HALF, sizeof half);
      doubles numbers = __builtin_convertvector(half, doubles);
      sums[i] += squares ? numbers * numbers : numbers;
    }
  }
  double sum = 0;
  for (int i = 0; i < EIGHT; i++) sum += sums[i / HALF][i % HALF];
  return sum;
}

static NOINLINE void softmax(const float *x, float *y, long count, float scale) {
  const float least = -__builtin_inff();
  vec most[4] = {all(least), all(least), all(least), all(least)}; /* in turns, so that no comparison waits for the last one */
  long k = 0;
  for (; k + 4 * LANES <= count; k += 4 * LANES)
    for (int i = 0; i < 4; i++) {
      vec some = load(x + k + i * LANES);
      most[i] = where(some > most[i], some, most[i]); /* ignores a NaN; the sum does not */
    }
  for (; k < count; k += LANES) {
    vec some = load_some(x + k, count - k, least);
    most[0] = where(some > most[0], some, most[0]);
  }
  for (int i = 1; i < 4; i++) most[0] = where(most[i] > most[0], most[i], most[0]);
  float largest = least;
  for (int i = 0; i < LANES; i++) largest = most[0][i] > largest ? most[0][i] : largest;
  for (long k = 0; k < count; k += LANES) {
    vec some = load_some(x + k, count - k, least);
    Power e = power(all(scale) * (some - all(largest)));
    store_some(y + k, count - k, e.number * e.scale);
  }
  vec sum = all(sum_of(y, count, 0));
  for (long k = 0; k < count; k += LANES) store_some(y + k, count - k, load_some(y + k, count - k, 0) / sum);
}

INLINE void gate(const float *x, float *y, long count, const int form) {
  for (long k = 0; k < count; k += LANES) {
    vec g = load_some(x + k, count - k, 0), up = load_some(x + count + k, count - k, 0), v = g;
    if (form == GEGLU) v = all(0x1.988454p0f) * fma_(all(0.044715f) * g * g, g, g);
    Power e = power(-v);
    if (form == SIGLU) g = all(1);
    store_some(y + k, count - k, g * e.over / (e.over + e.number) * up); /* g / (1 + e^-v), without overflow */
  }
}
static NOINLINE void swiglu(const float *x, float *y, long count) { gate(x, y, count, SWIGLU); }
static NOINLINE void geglu(const float *x, float *y, long count) { gate(x, y, count, GEGLU); }
static NOINLINE void siglu(const float *x, float *y, long count) { gate(x, y, count, SIGLU); }

static NOINLINE void norm(const float *x, float *y, long count, float eps, const float *weight) {
  vec size = all(1 / __builtin_sqrt(sum_of(x, count, 1) / count + eps));
  for (long k = 0; k < count; k += LANES) {
    vec numbers = load_some(x + k, count - k, 0) * size;
    store_some(y + k, count - k, numbers * load_some(weight + k, count - k, 0));
  }
}

/* tanh z is (1 - e^-2z) / (1 + e^-2z); near 0, where this would lose digits, a polynomial. */
static NOINLINE void cap(const float *x, float *y, long count, float most) {
  static const float near[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
  for (long k = 0; k < count; k += LANES) {
    vec z = load_some(x + k, count - k, 0) / all(most), size = where(z < all(0), -z, z), square = z * z, sum = all(near[0]);
    for (int i = 1; i < 5; i++) sum = fma_(sum, square, all(near[i]));
    Power e = power(size * all(-2));
    vec rest = e.number * e.scale, far = (all(1) - rest) / (all(1) + rest);
    store_some(y + k, count - k, all(most) * where(size < all(0.625f), fma_(sum * square, z, z), where(z < all(0), -far, far)));
  }
}

static NOINLINE void turn(const float *x, float *y, long count, const float *cos, const float *sin) {
  const long half = count / 2;
  for (long k = 0; k < count; k += half)
    for (long i = k; i < k + half; i += LANES) {
      const long left = k + half - i;
      vec other = load_some(x + (k ? i - half : i + half), left, 0);
      vec sum = times(load_some(x + i, left, 0), load_some(cos + i, left, 0));
      store_some(y + i, left, add(sum, times(other, load_some(sin + i, left, 0))));
    }
}

static NOINLINE void narrow(const float *x, void *y, long count) {
  for (long k = 0; k < count; k += LANES) {
    uint16_t some[LANES];
    vec v = load_some(x + k, count - k, 0);
    v = where((v < all(65520)) & (v > all(-65520)), v, all(__builtin_nanf(""))); /* these would round to infinity */
    store_float16s(some, v);
    memcpy((uint16_t *)y + k, some, at_most(LANES, count - k) * sizeof *some);
  }
}

/* --- attention -----------------------------------------------------------------------------------------------------------

   softmax(q k^T / sqrt(Dh)) v for each token and head, as in `llama.attention`, and with the same bits: the same sums, in
   the same order. But the scores never leave the cache, 16-bit keys and values are converted to float32 where they are
   used, and hardly anything is computed for rows that a token does not see.

   A row of x is one token: its queries, H heads of Dh numbers, and then four numbers (`SLOT` ...) that say which rows it
   sees. They may be followed by a sink for each head: a logit that joins the softmax but has no value. In place of a matrix
   there is a layer's slab, as `kv.py` draws it. The address passed to us is that of its label, a `Slab`, which is in the
   last 64 bytes of its memory.

   Consecutive tokens of a sequence form a tile: up to QUERIES queries of one key head, which share the reading of its rows.
   A tile and a key head are a unit of work. Whichever thread is free takes the next unit. The units of a head are
   consecutive, so that its rows are still in a cache. */

enum { SLOT, FIRST, LAST, SCORE_CAP, NUMBERS_OF_A_TOKEN }; /* the token sees rows FIRST..LAST; SCORE_CAP: 0 for no cap */
enum { QUERIES = 24, FEW_STRIPS = 3, ALIGNED = 64 };

typedef struct {
  uint32_t key[4];
  int32_t form, numbers;          /* ATTENTION; FLOAT32 or FLOAT16 */
  int32_t slots, heads, rows, Dh; /* `heads` key heads and `heads` value heads in each slot; `rows` rows in each */
  float scale;
} Slab;
_Static_assert(sizeof(Slab) <= LINE_NBYTES && offsetof(Slab, form) == offsetof(Packed, form), "told apart by its form");

INLINE int is_attention(const Packed *a) { return a && a->form == ATTENTION; }
INLINE const Slab *slab_of(const Product *p) { return (const Slab *)p->packed; }
INLINE long nbytes_of(const int form) { return form == FLOAT16 ? 2 : 4; }
INLINE long slab_nbytes(const Slab *s) { return 2L * s->slots * s->heads * s->rows * s->Dh * nbytes_of(s->numbers); }
INLINE long number_of(const Product *p, long m, int which) { return (long)p->x[m * p->ldx + p->N + which]; }
INLINE long queries_of(const Product *p) { return p->N / (slab_of(p)->heads * slab_of(p)->Dh); } /* of a key head */

static void *allocate(long nbytes) {
  void *memory = aligned_alloc(LINE_NBYTES, (nbytes + LINE_NBYTES - 1) / LINE_NBYTES * LINE_NBYTES);
  if (memory) return memory;
  fprintf(stderr, "nanobatch: no memory for %ld bytes\n", nbytes);
  abort();
}

/* `scratch` returns this thread's own memory for `count` numbers. */
static pthread_key_t scratch_key; /* frees the memory when the thread exits */
static __attribute__((constructor)) void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static float *scratch(long count) {
  static __thread float *memory;
  static __thread long size;
  if (count > size) {
    free(memory);
    size = count + count / 4;
    memory = allocate(size * sizeof *memory);
    pthread_setspecific(scratch_key, memory);
  }
  return memory;
}

/* The first row of x in the next tile. */
static long tile_end(const Product *p, long m) {
  const long most = QUERIES / queries_of(p);
  long end = m + 1;
  while (end < p->M && end < m + most && number_of(p, end, SLOT) == number_of(p, m, SLOT) &&
         number_of(p, end, LAST) == number_of(p, m, LAST) + end - m)
    end++;
  return end;
}

/* A block of keys or values, as in the slab or widened to float32. Its tiles compute the sums of `stored_tile` and
   `turned_tile` without the overhead for large matrices, because a sum has only about 64 products. With few queries, memory
   is the bottleneck, so the next block is prefetched. */
typedef struct {
  const char *at;
  long count, Dh;
  long wide; /* numbers from the scores of a query to those of the next */
} Rows;

INLINE float number(const char *at, long i, const int form) {
  return form == FLOAT16 ? float16(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}
INLINE vec numbers(const char *at, long i, const int form) {
  return form == FLOAT16 ? float16s((const uint16_t *)at + i) : load((const float *)at + i);
}

/* The scores of `count` queries with `cols` keys. */
INLINE void score_tile(const Rows *p, const float *q, const char *keys, float *scores, const int count, const int cols,
                       const int form) {
  const long Dh = p->Dh, whole = Dh / ORDER * ORDER;
  Sums sums;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) {
    vec sum[1][ROWS][COLS];
    copy(NULL, sum, 1, count, cols);
    for (long k = i * LANES; k < whole; k += ORDER) {
      vec own[ROWS];
#pragma GCC unroll 6
      for (int r = 0; r < count; r++) {
        own[r] = load(q + r * Dh + k);
        KEEP(own[r]);
      }
#pragma GCC unroll 4
      for (int c = 0; c < cols; c++) {
        vec key = numbers(keys, c * Dh + k, form);
        KEEP(key);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) sum[0][r][c] = fma_(own[r], key, sum[0][r][c]);
      }
    }
    copy(sum, &sums[i], 1, count, cols);
  }
  add_parts(sums, count, cols);
#pragma GCC unroll 6
  for (int r = 0; r < count; r++) {
    four four_sums = add_columns(sums[0][r], cols);
    if (cols == COLS && whole == Dh) {
      store_four(scores + r * p->wide, four_sums);
      continue;
    }
    float total[COLS];
    store_four(total, four_sums);
    for (int c = 0; c < cols; c++) {
      for (long k = whole; k < Dh; k++) total[c] = fma_one(q[r * Dh + k], number(keys, c * Dh + k, form), total[c]);
      scores[r * p->wide + c] = total[c];
    }
  }
}

INLINE void score(const Rows *p, const float *q, float *scores, const int count, const int form) {
  const long row = p->Dh * nbytes_of(form), ahead = p->count * row;
  long j = 0;
  for (; j + COLS <= p->count; j += COLS) {
    const char *keys = p->at + j * row;
    for (long i = 0; form == FLOAT16 && i < COLS * row; i += LINE_NBYTES) __builtin_prefetch(keys + ahead + i);
    score_tile(p, q, keys, scores + j, count, COLS, form);
  }
  for (; j < p->count; j++) score_tile(p, q, p->at + j * row, scores + j, count, 1, form);
}

/* Add the values times their weights in `scores` to `cols` vectors of each row of y, starting at i. */
INLINE void weigh_tile(const Rows *p, const float *scores, float *y, long i, const int count, const int cols, const int form) {
  const long ahead = p->count * p->Dh * nbytes_of(form);
  vec sum[ROWS][WIDEST];
  for (int r = 0; r < count; r++)
    for (int c = 0; c < cols; c++) sum[r][c] = load(y + r * p->Dh + i + c * LANES);
  for (long k = 0; k < p->count; k++) {
    const char *values = p->at + (k * p->Dh + i) * nbytes_of(form);
    vec own[ROWS];
    for (int r = 0; r < count; r++) {
      own[r] = all(scores[r * p->wide + k]);
      KEEP(own[r]);
    }
    for (int c = 0; c < cols; c++) {
      if (form == FLOAT16 && c * LANES % (LINE_NBYTES / 2) == 0) __builtin_prefetch(values + ahead + 2 * c * LANES);
      vec value = numbers(values, c * LANES, form);
      KEEP(value);
      for (int r = 0; r < count; r++) sum[r][c] = fma_(own[r], value, sum[r][c]);
    }
  }
  for (int r = 0; r < count; r++)
    for (int c = 0; c < cols; c++) store(y + r * p->Dh + i + c * LANES, sum[r][c]);
}

INLINE void weigh(const Rows *p, const float *scores, float *y, const int count, const int form) {
  const long whole = p->Dh / LANES * LANES;
  long i = 0;
  for (; count == 1 && i + WIDEST * LANES <= whole; i += WIDEST * LANES) weigh_tile(p, scores, y, i, count, WIDEST, form);
  for (; i + COLS * LANES <= whole; i += COLS * LANES) weigh_tile(p, scores, y, i, count, COLS, form);
  for (; i < whole; i += LANES) weigh_tile(p, scores, y, i, count, 1, form);
  for (; i < p->Dh; i++)
    for (int r = 0; r < count; r++)
      for (long k = 0; k < p->count; k++) {
        float value = number(p->at, k * p->Dh + i, form);
        y[r * p->Dh + i] = fma_one(scores[r * p->wide + k], value, y[r * p->Dh + i]);
      }
}

typedef void Score(const Rows *p, const float *q, float *scores);
typedef void Weigh(const Rows *p, const float *scores, float *y);
#define ATTENTION_OF(form, count)                                                      \
  static NOINLINE void score_##form##count(const Rows *p, const float *q, float *scores) { score(p, q, scores, count, form); } \
  static NOINLINE void weigh_##form##count(const Rows *p, const float *scores, float *y) { weigh(p, scores, y, count, form); }
#define ATTENTIONS(count) ATTENTION_OF(FLOAT32, count) ATTENTION_OF(FLOAT16, count)
ATTENTIONS(1) ATTENTIONS(2) ATTENTIONS(3)
#if defined(__AVX512F__) || defined(__aarch64__)
ATTENTIONS(4) ATTENTIONS(5) ATTENTIONS(6)
#endif
static Score *const scorers[][ROWS + 1] = {[FLOAT32] = HEIGHTS(score_FLOAT32), [FLOAT16] = HEIGHTS(score_FLOAT16)};
static Weigh *const weighers[][ROWS + 1] = {[FLOAT32] = HEIGHTS(weigh_FLOAT32), [FLOAT16] = HEIGHTS(weigh_FLOAT16)};

/* Convert a block to float32 in `to`, and prefetch the next one. */
static const char *widened(const char *rows, long count, float *to) {
  const uint16_t *at = (const uint16_t *)rows;
  const long whole = count / LANES * LANES;
  for (long i = 0; i < whole; i += LANES) {
    if (i % (LINE_NBYTES / 2) == 0) __builtin_prefetch(at + count + i);
    store(to + i, float16s(at + i));
  }
  for (long i = whole; i < count; i++) to[i] = float16(at[i]);
  return (const char *)to;
}

static NOINLINE void attend(const Product *p, long unit) {
  const Slab *s = slab_of(p);
  const long Dh = s->Dh, group = queries_of(p), head = unit / p->tile_count;
  const long m0 = p->tiles[unit % p->tile_count], m1 = p->tiles[unit % p->tile_count + 1], count = (m1 - m0) * group;
  const long slot = number_of(p, m0, SLOT), end = number_of(p, m1 - 1, LAST) + 1;
  const long from = number_of(p, m0, FIRST) / ALIGNED * ALIGNED; /* so that each partial sum of the softmax adds the same numbers */
  const long before = p->K > p->N + NUMBERS_OF_A_TOKEN ? LINE : 0; /* room for a sink; a whole line, so that rows stay in the same partial sums */
  const long T = end - from, wide = before + (T + LINE - 1) / LINE * LINE;
  if (slot < 0 || slot >= s->slots || from < 0 || T <= 0 || end > s->rows) {
    fprintf(stderr, "nanobatch: attention over rows %ld..%ld of slot %ld\n", from, end, slot);
    abort();
  }
  const long row = Dh * nbytes_of(s->numbers), block = (WIDE / Dh + COLS) / COLS * COLS;
  const char *keys = (const char *)s + LINE_NBYTES - slab_nbytes(s) + ((slot * 2 * s->heads + head) * s->rows + from) * row;
  const char *values = keys + s->heads * s->rows * row;
  float *memory = scratch(count * (wide + 2 * Dh) + block * Dh), *scores = memory + before;
  float *q = memory + count * wide, *y = q + count * Dh;
  float *wider = y + count * Dh;
  const int widens = s->numbers == FLOAT16 && count > FEW_STRIPS * ROWS; /* convert once instead of in each strip */
  const int form = widens ? FLOAT32 : s->numbers;

  for (long i = 0; i < count; i++)
    memcpy(q + i * Dh, p->x + (m0 + i / group) * p->ldx + (head * group + i % group) * Dh, Dh * sizeof *q);

  for (long j = 0; j < T; j += block) {
    Rows some = {keys + j * row, at_most(block, T - j), Dh, wide};
    if (widens) some.at = widened(some.at, some.count * Dh, wider);
    for (long i = 0, height; i < count; i += height) {
      height = next_height(count - i, ROWS);
      scorers[form][height](&some, q + i * Dh, scores + i * wide + j);
    }
  }

  for (long i = 0; i < count; i++) {
    const long m = m0 + i / group, first = number_of(p, m, FIRST) - from, stop = number_of(p, m, LAST) + 1 - from;
    const float *numbers = p->x + m * p->ldx + p->N, most = numbers[SCORE_CAP], scale = most != 0 ? 1 : s->scale;
    float *own = scores + i * wide;
    for (long j = 0; j < before; j++) own[j - before] = j ? -__builtin_inff() : numbers[NUMBERS_OF_A_TOKEN + head * group + i % group] / scale;
    if (most != 0) {
      for (long j = 0; j < stop; j++) own[j] *= s->scale;
      cap(own, own, stop, most);
    }
    for (long j = 0; j < first; j++) own[j] = -__builtin_inff();
    softmax(own - before, own - before, stop + before, scale);
    for (long j = stop; j < T; j++) own[j] = 0;
  }

  memset(y, 0, count * Dh * sizeof *y);
  for (long k = 0; k < T; k += block) {
    Rows some = {values + k * row, at_most(block, T - k), Dh, wide};
    if (widens) some.at = widened(some.at, some.count * Dh, wider);
    for (long i = 0, height; i < count; i += height) {
      height = next_height(count - i, ROWS);
      weighers[form][height](&some, scores + i * wide + k, y + i * Dh);
    }
  }

  for (long i = 0; i < count; i++)
    memcpy(p->y + (m0 + i / group) * p->ldy + (head * group + i % group) * Dh, y + i * Dh, Dh * sizeof *y);
}

#include "delta_net.c"

static void operate(const Product *p, long m0, long m1) {
  const Packed *a = p->packed;
  for (long m = m0; m < m1; m++) {
    const float *x = p->x + m * p->ldx;
    float *y = p->y + m * p->ldy;
    if (a->form == SOFTMAX) softmax(x, y, p->N, a->setting);
    if (a->form == SWIGLU) swiglu(x, y, p->N);
    if (a->form == GEGLU) geglu(x, y, p->N);
    if (a->form == SIGLU) siglu(x, y, p->N);
    if (a->form == NORM) norm(x, y, p->N, a->setting, (const float *)line(a, 1));
    if (a->form == CAP) cap(x, y, p->N, a->setting);
    if (a->form == TURN) {
      const float *cos = (const float *)line(a, 1) + m / (p->M / a->N) * 2 * p->K;
      turn(x, y, p->K, cos, cos + p->K);
    }
    if (a->form == TO_FLOAT16) narrow(x, y, p->K);
  }
}

/* Compute rows m0..m1 and columns j0..j1 of a product. */
static void multiply(const Product *p, long m0, long m1, long j0, long j1) {
  if (is_operation(p->packed)) {
    operate(p, m0, m1);
    return;
  }
  if (p->strips) {
    const int is_8 = is_rounded(form_of(p));
    if (p->makes_strips) (is_8 ? round_rows : make_strips)(p, m0, m1);
    else (is_8 ? multiply_rounded : multiply_many)(p, j0, j1);
    return;
  }
  if (p->is_turned) {
    turned_block(p, m0, m1, j0, j1);
    return;
  }
  multiply_few(p, m0, m1, j0, j1);
}

/* True if x is copied into strips first, which pays for many rows. */
static int needs_strips(const Product *p) {
  const int form = form_of(p);
  if (p->is_turned || is_operation(p->packed)) return 0;
  if (is_rounded(form)) return 1;
  const long few = form == FLOAT32 ? FEW_OF_FLOATS : form == FOUR_BITS ? FEW_OF_FOUR_BITS : FEW;
  return p->M > few && p->K >= ORDER && (p->packed || p->N > NARROW);
}

#include "experts.c"

/* --- threads: a product is split into shares, and each free thread takes the next one -----------------------------------

   The calling thread computes, too. It takes shares until none is left, and then waits only for shares that helper threads
   have started. So a helper whose core is busy with another program delays nothing. A helper that finds no share spins for
   SPIN_NS, and then sleeps. A caller that waits for a helper's last share does the same, so that the helper may run on the
   caller's core.

   Threads sleep on semaphores. (With glibc's condition variables, the signalling thread may have to wait for threads that
   were signalled earlier: up to 88 ms on a busy machine.)

   A share is a range of rows or columns, never a part of a sum. So it makes no difference which thread computes it. */

enum {
  OWNER_SLEEPS = 1 << 20, /* added to `unfinished`, which is smaller */
  SPIN_NS = 50000,
  ALONE = 150000, /* multiplications: a smaller product is finished before a helper would start */
  SHARE = 20000,         /* least multiplications of a share */
  PACKED_ALONE = 400000, /* the same two limits for packed weights, */
  PACKED_SHARE = 200000, /* which take less time */
  OF_A_POWER = 10,       /* the cost of one number of an operation, in multiplications */
  HEIGHT_OF_SHARE = 12,
  WIDTH_OF_SHARE = LINE, /* so that no two shares write to the same cache line */
  MANY = 64, /* rows: from here on shares take long, so there are twice as many, for a shorter wait for the last */
};

static struct {
  pthread_mutex_t owner; /* held by the thread whose product is being shared */
  Product product;
  int shares, by_rows;
  atomic_int untaken, unfinished; /* shares */
  atomic_int asleep;              /* helpers that wait for `wake` without a pending post */
  sem_t wake, done;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER};
static atomic_int threads = 1;

static long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void compute_share(const Product *p, long share, long shares, int by_rows) {
  if (is_attention(p->packed) || is_delta(p->packed)) {
    (is_delta(p->packed) ? change_state : attend)(p, share);
    return;
  }
  if (is_stack(p->packed)) {
    if (p->makes_strips) round_pairs(p, share, shares);
    else multiply_run(p, share);
    return;
  }
  long unit = by_rows ? HEIGHT_OF_SHARE : WIDTH_OF_SHARE;
  long all = by_rows ? p->M : p->N;
  long units = (all + unit - 1) / unit;
  long from = units * share / shares * unit;
  long to = at_most(units * (share + 1) / shares * unit, all);
  if (by_rows) multiply(p, from, to, 0, p->N);
  else multiply(p, 0, p->M, from, to);
}

/* Compute a share if one is left. Once a share is taken, the product does not change until the share is finished. */
static int take_share(void) {
  if (atomic_load(&pool.untaken) <= 0) return 0;
  int left = atomic_fetch_sub(&pool.untaken, 1);
  if (left <= 0) return 0;
  compute_share(&pool.product, pool.shares - left, pool.shares, pool.by_rows);
  if (atomic_fetch_sub(&pool.unfinished, 1) == OWNER_SLEEPS + 1) sem_post(&pool.done);
  return 1;
}

/* Each thread has its own floating-point setting: the rounding mode, and whether denormals are flushed to zero. A library
   compiled with -ffast-math changes the setting of the thread that loads it, so a number would depend on the thread that
   computes it. So every product runs with the default setting, and the caller's is restored afterwards. (Flushing denormals
   everywhere would be faster only in the plain form, and only if nearly all products of two numbers are that small.) */
#if defined(__SSE__)
typedef unsigned Setting;
static Setting change_setting(Setting to) {
  Setting before = _mm_getcsr();
  _mm_setcsr(to);
  return before;
}
enum { USUAL = 0x1f80 };
#elif defined(__aarch64__)
typedef unsigned long Setting;
static Setting change_setting(Setting to) {
  Setting before;
  __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, %1" : "=&r"(before) : "r"(to) : "memory");
  return before;
}
enum { USUAL = 0 };
#else
typedef int Setting;
static Setting change_setting(Setting to) { return to; }
enum { USUAL = 0 };
#endif

static void *helper(void *nothing) {
  change_setting(USUAL);
  for (;;) {
    long until = nanoseconds() + SPIN_NS;
    while (nanoseconds() < until) {
      if (take_share()) until = nanoseconds() + SPIN_NS;
      else { REST(); }
    }
    atomic_fetch_add(&pool.asleep, 1);
    while (sem_wait(&pool.wake)) {} /* repeat if interrupted by a signal */
  }
  return nothing;
}

static void share_out(const Product *p, int shares, int by_rows) {
  pool.product = *p;
  pool.shares = shares;
  pool.by_rows = by_rows;
  atomic_store(&pool.unfinished, shares);
  atomic_store(&pool.untaken, shares); /* from here on, helpers take shares */
  int woken = (int)at_most(atomic_load(&pool.asleep), shares - 1);
  atomic_fetch_sub(&pool.asleep, woken);
  for (int i = 0; i < woken; i++) sem_post(&pool.wake);
  while (take_share()) {}

  long until = nanoseconds() + SPIN_NS;
  while (atomic_load(&pool.unfinished) && nanoseconds() < until) REST();
  if (atomic_fetch_add(&pool.unfinished, OWNER_SLEEPS))
    while (sem_wait(&pool.done)) {}
}

static void run_units(const Product *p, long units, double work, double alone) {
  if (threads == 1 || work < alone || pthread_mutex_trylock(&pool.owner)) {
    for (long unit = 0; unit < units; unit++) compute_share(p, unit, units, 0);
    return;
  }
  share_out(p, (int)units, 0);
  pthread_mutex_unlock(&pool.owner);
}

/* Run attention or the gated delta rule: a unit of work is one head of a tile. */
static NOINLINE void run_heads(Product p) {
  const int is_state = is_delta(p.packed);
  long *tiles = allocate((p.M + 1) * sizeof *tiles), count = 0;
  double work = is_state ? 4. * p.M * p.N * states_of(&p)->Dk : 0;
  for (long m = 0; m < p.M; m = (is_state ? sequence_end : tile_end)(&p, m)) tiles[count++] = m;
  tiles[count] = p.M;
  for (long m = 0; m < p.M && !is_state; m++) work += 2. * p.N * (number_of(&p, m, LAST) - number_of(&p, m, FIRST) + 1);
  p.tiles = tiles;
  p.tile_count = count;
  run_units(&p, count * (is_state ? states_of(&p)->Hk : slab_of(&p)->heads), work, ALONE);
  free(tiles);
}

/* Run experts: a unit of work is a chunk of a run's columns. Units are small, because runs have different lengths. */
static NOINLINE void run_experts(Product p) {
  enum { UNITS = 64 }; /* at least, for each thread, if chunks are wide enough */
  Runs runs;
  find_runs(&p, &runs);
  const Stack *s = stack_of(&p);
  const Packed *a = matrix_of(s, 0);
  const long pairs = runs.first[runs.count], most = (s->N + 4 * LINE - 1) / (4 * LINE);
  const double work = (double)pairs * s->N * s->K;
  runs.chunks = at_most((UNITS * threads + runs.count - 1) / runs.count, most);
  if (is_rounded(a->form)) {
    p.strips = allocate(pairs * s->K);
    p.steps = allocate(pairs * steps_of(a) * sizeof *p.steps);
    p.makes_strips = 1;
    run_units(&p, (pairs + HEIGHT_OF_SHARE - 1) / HEIGHT_OF_SHARE, (double)pairs * s->K * OF_A_POWER, PACKED_ALONE);
    p.makes_strips = 0;
  }
  run_units(&p, runs.count * runs.chunks, work, PACKED_ALONE);
  free(p.strips);
  free(p.steps);
  free(runs.pairs);
}

static void run(const Product *p);
static NOINLINE void run_in_strips(Product p) {
  const int is_8 = is_rounded(form_of(&p));
  p.strips = allocate(p.M * p.K * (is_8 ? sizeof(int8_t) : sizeof(float)));
  p.steps = is_8 ? allocate(p.M * steps_of(p.packed) * sizeof *p.steps) : NULL;
  p.makes_strips = 1;
  run(&p);
  p.makes_strips = 0;
  run(&p);
  free(p.strips);
  free(p.steps);
}

/* Replace the pages of fresh memory for weights by pages of 2 MiB, if the system has them. They need fewer address lookups,
   so weights are read up to a third faster. The memory is the result of a product, so that MLX frees it. */
static void give_memory(void *at, long nbytes) {
#ifdef MADV_HUGEPAGE
  enum { LARGE = 1 << 21 };
  const uintptr_t begin = ((uintptr_t)at + LARGE - 1) / LARGE * LARGE, end = ((uintptr_t)at + nbytes) / LARGE * LARGE;
  if (begin >= end) return;
  madvise((void *)begin, end - begin, MADV_DONTNEED); /* drop small pages that are already mapped */
  madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
}

static NOINLINE void run(const Product *p) {
  if (p->packed && p->packed->form == MEMORY) {
    give_memory(p->y, p->N * sizeof *p->y);
    return;
  }
  if (is_attention(p->packed) || is_delta(p->packed)) {
    run_heads(*p);
    return;
  }
  if (is_stack(p->packed)) {
    run_experts(*p);
    return;
  }
  if (needs_strips(p) && !p->strips) {
    run_in_strips(*p);
    return;
  }
  double work = (double)p->M * (p->makes_strips ? OF_A_POWER : p->N) * (is_operation(p->packed) ? OF_A_POWER : p->K);
  if (threads == 1 || work < (p->packed ? PACKED_ALONE : ALONE) || pthread_mutex_trylock(&pool.owner)) {
    multiply(p, 0, p->M, 0, p->N); /* also if another thread's product is being shared now */
    return;
  }
  int by_rows = p->N < WIDTH_OF_SHARE * threads || (p->is_turned && p->M >= HEIGHT_OF_SHARE * threads);
  if (is_operation(p->packed)) by_rows = 1;
  if (p->strips) by_rows = p->makes_strips;
  long units = by_rows ? (p->M + HEIGHT_OF_SHARE - 1) / HEIGHT_OF_SHARE : (p->N + WIDTH_OF_SHARE - 1) / WIDTH_OF_SHARE;
  long each = p->M < MANY ? 8 : 16; /* shares for each thread */
  long shares = at_most(at_most(each * threads, units), (long)(work / (p->packed ? PACKED_SHARE : SHARE)));
  share_out(p, (int)shares, by_rows);
  pthread_mutex_unlock(&pool.owner);
}

/* --- packing weights: from a file to the layout that the products above read ----------------------------------------------

   A row of a file has either MLX's format, with bit-packed numbers and separate scales and offsets, or the blocks of a GGUF
   file, each of which begins or ends with its own scales (`models/gguf_weights.py` has the formulas):

       Q4_0   32 weights   d, 16 bytes: the lower halves are the first 16 weights             Q4_1   d, m, the same
       Q5_0   32           d, 32 fifth bits, 16 bytes                                         Q5_1   d, m, the same
       Q8_0   32           d, 32 signed bytes
       Q4_K   256          d, dmin, 12 bytes of scales and minima, 128 bytes: of 32 bytes the lower halves, then the upper
       Q5_K   256          d, dmin, the same 12, 32 bytes of fifth bits, 128 bytes
       Q6_K   256          128 bytes of lower halves, 64 of upper two bits, 16 signed scales, d
       MXFP4  32           a byte for the scale, 16 bytes: each half says which of 16 numbers a weight is (CODES: in pairs)

   SPAN weights of a row at a time are unpacked to bytes, and then written to their places in the matrix. */

enum { CODES = 99, OF_GGUF, Q4_0 = OF_GGUF, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q4_K, Q5_K, Q6_K };

typedef union {
  uint8_t bytes[SPAN];
  uint32_t words[SPAN / 4]; /* four weights each */
  uint64_t eights[SPAN / 8];
} Numbers;

/* Unpack numbers of `bits` bits: 8 of them take `bits` bytes. */
INLINE void spread(const uint8_t *from, uint8_t *to, long count, const int bits) {
  for (long i = 0; i < count; i += 8, from += bits) {
    uint64_t eight = 0;
    memcpy(&eight, from, bits);
    for (int n = 0; n < 8; n++) to[i + n] = eight >> n * bits & ((1 << bits) - 1);
  }
}

/* Write the lower halves of `count` bytes, then the upper halves. */
INLINE void split(const uint8_t *from, uint8_t *to, const long count) {
  for (long i = 0; i < count; i++) {
    to[i] = from[i] & 15;
    to[count + i] = from[i] >> 4;
  }
}

/* Spread eight fifth bits to eight bytes. Byte n of `bits` is 0 or 2^n. */
INLINE uint64_t fifth_bits(uint8_t eight) {
  const uint64_t bits = eight * 0x0101010101010101u & 0x8040201008040201u;
  return (bits + 0x7f7f7f7f7f7f7f7fu & 0x8080808080808080u) >> 3;
}

/* Unpack blocks of 32 weights: `before` bytes precede the numbers; if `fifth`, the last four of them are the fifth bits. */
INLINE void split_blocks(const uint8_t *from, uint64_t *to, long count, const int before, const int fifth) {
  for (long k = 0; k < count; k += 32, from += before + 16, to += 4) {
    uint64_t halves[2];
    memcpy(halves, from + before, sizeof halves);
    for (int i = 0; i < 4; i++)
      to[i] = (halves[i % 2] >> i / 2 * 4 & 0x0f0f0f0f0f0f0f0fu) | (fifth ? fifth_bits(from[before - 4 + i]) : 0);
  }
}

static long block_nbytes(int source) { return (long[]){18, 20, 22, 24, 34, 17, 144, 176, 210}[source - OF_GGUF]; }
static long source_bits(int source) { return source == CODES ? 4 : source; }
static long block_size(int source) { return source < Q4_K ? 32 : SPAN; }

/* Unpack up to SPAN numbers of a row, from number k on. */
static void read_numbers(const uint8_t *row, long k, long count, int source, Numbers *to) {
  uint8_t *numbers = to->bytes;
  const uint8_t *at = source < OF_GGUF ? row + k * source_bits(source) / 8 : row + k / block_size(source) * block_nbytes(source);
  switch (source) {
    case 2: spread(at, numbers, count, 2); break;
    case 3: spread(at, numbers, count, 3); break;
    case 4:
    case CODES:
      for (long i = 0; i < count / 2; i++) numbers[2 * i] = at[i] & 15, numbers[2 * i + 1] = at[i] >> 4;
      break;
    case 5: spread(at, numbers, count, 5); break;
    case 6: spread(at, numbers, count, 6); break;
    case 8: memcpy(numbers, at, count); break;
    case Q4_0: split_blocks(at, to->eights, count, 2, 0); break;
    case Q4_1: split_blocks(at, to->eights, count, 4, 0); break;
    case Q5_0: split_blocks(at, to->eights, count, 6, 1); break;
    case Q5_1: split_blocks(at, to->eights, count, 8, 1); break;
    case Q8_0:
      for (long b = 0; b < count; b += 32)
        for (int i = 0; i < 32; i++) numbers[b + i] = at[b / 32 * 34 + 2 + i] ^ 128;
      break;
    case MXFP4: split_blocks(at, to->eights, count, 1, 0); break;
    case Q4_K:
      for (int c = 0; c < 4; c++) split(at + 16 + 32 * c, numbers + 64 * c, 32);
      break;
    case Q5_K:
      for (int c = 0; c < 4; c++) split(at + 48 + 32 * c, numbers + 64 * c, 32);
      for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++) numbers[32 * g + i] |= (at[16 + i] >> g & 1) << 4;
      break;
    case Q6_K:
      for (int half = 0; half < 2; half++) split(at + 64 * half, numbers + 128 * half, 64);
      for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++) numbers[32 * g + i] |= (at[128 + g / 4 * 32 + i] >> 2 * (g % 4) & 3) << 4;
  }
}

/* Write numbers of row j, from k on, in the layout of the matrix. */
INLINE void write_numbers(const Numbers *numbers, long count, const Packed *a, long j, long k, const int form) {
  uint8_t *weights = (uint8_t *)line(a, 1);
  if (form == EIGHT_BITS) memcpy(weights + j * a->K + k, numbers->bytes, count);
  if (form == FOUR_BITS)
    for (long block = 0; block < count; block += BLOCK) {
      const uint8_t *from = numbers->bytes + block;
      uint8_t *to = weights + j * row_nbytes(a->K, form) + (k + block) / 2;
      for (long i = 0; i < ORDER; i++)
        for (long byte = 0; byte < 4; byte++)
          to[4 * i + byte] = from[2 * byte * ORDER + i] | from[(2 * byte + 1) * ORDER + i] << 4;
    }
  if (!is_rounded(form)) return;
  const long unit = unit_of(form), lines = unit * bits_of(form) / 32;
  uint8_t *word = weights + ((j / ORDER * a->K + k) / unit * lines * ORDER + j % ORDER) * 4;
  for (long i = 0; i < count / 4; i += unit / 4, word += lines * LINE_NBYTES) {
    const uint32_t halves = 0x0f0f0f0f, *four = numbers->words + i;
    uint32_t upper = 0, low;
    for (long n = 0; form == ROUNDED_8 && n < 2; n++) memcpy(word + n * LINE_NBYTES, four + n, 4);
    for (long n = 0; form != ROUNDED_8 && n < unit / 4; n += 2) {
      low = (four[n] & halves) | (four[n + 1] & halves) << 4;
      memcpy(word + n / 2 * LINE_NBYTES, &low, 4);
    }
    for (long n = 0; form == ROUNDED_5 && n < 8; n++) upper |= (four[n] >> 4 & 0x01010101) << n;
    for (long n = 0; form == ROUNDED_6 && n < 4; n++) upper |= (four[n] >> 4 & 0x03030303) << 2 * n;
    if (form == ROUNDED_5 || form == ROUNDED_6) memcpy(word + unit / 8 * LINE_NBYTES, &upper, 4);
  }
}

/* The code of an MXFP4 value; 0 for numbers that are not values of the format. */
static const uint8_t to_mxfp4[32] = {[0] = 15, [4] = 14, [6] = 13, [8] = 12, [9] = 11, [10] = 10, [11] = 9,
                                     [13] = 1, [14] = 2, [15] = 3, [16] = 4, [18] = 5, [20] = 6, [24] = 7};

/* The address of scale or offset g of row j; with 8 bits, `size_at` is that of the float16 factor of its SPAN. */
INLINE char *factor_at(const Packed *a, int lines, long j, long g) {
  const long nbytes = factor_nbytes(a), row = factors_nbytes(a);
  char *at = (char *)line(a, lines);
  return is_rounded(a->form) ? at + j / ORDER * ORDER * row + (g * ORDER + j % ORDER) * nbytes : at + j * row + g * nbytes;
}
INLINE char *size_at(const Packed *a, int lines, long j, long span) {
  const long row = factors_nbytes(a);
  char *at = (char *)line(a, lines);
  if (!is_rounded(a->form)) return at + j * row + a->groups + 2 * span;
  return at + (j / ORDER * row + a->groups) * ORDER + 2 * (span * ORDER + j % ORDER);
}

/* Copy the scales or offsets of row j, which are contiguous in MLX's format. */
static void copy_factors(const Packed *a, int lines, long j, const char *from) {
  const long nbytes = factor_nbytes(a), spans = a->form_of_scales == EIGHT_BITS ? a->K / SPAN : 0;
  for (long g = 0; g < a->groups; g++, from += nbytes) memcpy(factor_at(a, lines, j, g), from, nbytes);
  for (long span = 0; span < spans; span++, from += 2) memcpy(size_at(a, lines, j, span), from, 2);
}

/* Copy the scales and offsets of the weights k..k + count of row j from the blocks of a GGUF file. */
static void block_factors(const Packed *a, long j, long k, long count, const uint8_t *row, int source) {
  const uint8_t *at = row + k / block_size(source) * block_nbytes(source);
  const int has_offsets = a->setting == 0;
  for (long g = k / 32; source < Q4_K && g < (k + count) / 32; g++, at += block_nbytes(source)) {
    const uint16_t power = *at > 1 ? (*at - 1) << 7 : 0x20 << *at; /* of MXFP4, 2^(byte - 128) in bfloat16 */
    memcpy(factor_at(a, a->scales, j, g), source == MXFP4 ? (const void *)&power : at, 2);
    if (has_offsets) memcpy(factor_at(a, a->offsets, j, g), at + 2, 2);
  }
  if (source < Q4_K) return;
  memcpy(size_at(a, a->scales, j, k / SPAN), source == Q6_K ? at + 208 : at, 2);
  for (int g = 0; source == Q6_K && g < 16; g++) *factor_at(a, a->scales, j, k / 16 + g) = at[192 + g] ^ 128;
  if (source == Q6_K) return;
  const uint8_t minus[] = {at[2], at[3] ^ 128}; /* -dmin */
  memcpy(size_at(a, a->offsets, j, k / SPAN), minus, 2);
  for (int g = 0; g < 8; g++) { /* six bits each; the upper two of the last four are stored with the first */
    const uint8_t *low = at + 4 + g % 4, last = at[12 + g % 4];
    *factor_at(a, a->scales, j, k / 32 + g) = 128 + (g < 4 ? low[0] & 63 : (last & 15) | low[0] >> 6 << 4);
    *factor_at(a, a->offsets, j, k / 32 + g) = 128 + (g < 4 ? low[4] & 63 : last >> 4 | low[4] >> 6 << 4);
  }
}

/* The number of bytes of a packed row of K weights. */
long rows_width(int form, long K) { return row_nbytes(K, form); }

/* Write a `Packed`. Its weights begin in the next cache line; `scales` and `offsets` are positions in lines, too. With a
   `center`, each offset is its scale times the center, and no offsets are stored. */
void rows_pack(void *at, int form, int form_of_scales, int N, int K, int group, int scales, int offsets, float center) {
  int shift = form >= FOUR_BITS ? __builtin_ctz(group) : 30; /* with 16 bits a row is one group */
  Packed a = {{key[0], key[1]}, form, form_of_scales, N, K, group, K / group, shift, scales, offsets, center};
  memcpy(at, &a, sizeof a);
  if (!is_rounded(form) || N % ORDER == 0) return; /* rows that fill the last panel are zeros */
  const long panel = N / ORDER * ORDER, row = row_nbytes(K, form);
  memset((char *)line(at, 1) + panel * row, 0, ORDER * row);
  memset(factor_at(at, scales, panel, 0), 0, ORDER * factors_nbytes(at));
  if (center == 0) memset(factor_at(at, offsets, panel, 0), 0, ORDER * factors_nbytes(at));
}

/* Write a `Stack`, whose matrices follow. */
void rows_stack(void *at, int experts, int N, int K, int lines, int bias) {
  Stack stack = {{key[0], key[1]}, EXPERTS, experts, N, K, lines, bias};
  memcpy(at, &stack, sizeof stack);
}

/* Fill `count` rows of a matrix, from row `first` on, with rows of a file. `source`: the bits of a weight, or a GGUF type,
   whose blocks also hold scales and offsets. */
void rows_lay(void *matrix, long first, long count, int source, const uint8_t *from, const char *scales, const char *offsets) {
  const Packed *a = matrix;
  const long row = source < OF_GGUF ? a->K * source_bits(source) / 8 : a->K / block_size(source) * block_nbytes(source);
  const int are_codes = source == CODES || source == MXFP4;
  for (long j0 = first, j1; j0 < first + count; j0 = j1) { /* a panel, so that its lines stay in the L1 cache */
    j1 = at_most(j0 / ORDER * ORDER + ORDER, first + count);
    for (long k = 0; a->form >= FOUR_BITS && k < a->K; k += SPAN)
      for (long j = j0; j < j1; j++) {
        const long some = at_most(SPAN, a->K - k);
        Numbers numbers = {{0}};
        read_numbers(from + (j - first) * row, k, some, source, &numbers);
        if (a->form == FOUR_BITS) write_numbers(&numbers, some, a, j, k, FOUR_BITS);
        for (long i = 0; are_codes && a->form == EIGHT_BITS && i < some; i += sizeof(words)) {
          const words w = looked_up_bytes(load_words(numbers.bytes + i));
          memcpy(numbers.bytes + i, &w, sizeof w);
        }
        if (a->form == EIGHT_BITS) write_numbers(&numbers, some, a, j, k, EIGHT_BITS);
        if (a->form == ROUNDED_4) write_numbers(&numbers, some, a, j, k, ROUNDED_4);
        if (a->form == ROUNDED_5) write_numbers(&numbers, some, a, j, k, ROUNDED_5);
        if (a->form == ROUNDED_6) write_numbers(&numbers, some, a, j, k, ROUNDED_6);
        if (a->form == ROUNDED_8) write_numbers(&numbers, some, a, j, k, ROUNDED_8);
        if (a->form == ROUNDED_MXFP4) {
          for (long i = 0; !are_codes && i < some; i++) numbers.bytes[i] = to_mxfp4[numbers.bytes[i] & 31];
          write_numbers(&numbers, some, a, j, k, ROUNDED_MXFP4);
        }
        if (source >= OF_GGUF) block_factors(a, j, k, some, from + (j - first) * row, source);
      }
    for (long j = j0; j < j1; j++) {
      if (a->form < FOUR_BITS) memcpy((char *)line(a, 1) + j * row, from + (j - first) * row, row);
      if (source < OF_GGUF && scales) copy_factors(a, a->scales, j, scales + (j - first) * factors_nbytes(a));
      if (source < OF_GGUF && offsets) copy_factors(a, a->offsets, j, offsets + (j - first) * factors_nbytes(a));
    }
  }
}

/* Whether the float16 numbers in blocks are finite, and the scales of MXFP4. */
static int are_finite(const uint8_t *at, long blocks, int source) {
  const long nbytes = block_nbytes(source);
  const int has_two = source == Q4_1 || source == Q5_1 || source == Q4_K || source == Q5_K;
  int infinite = 0;
  for (at += source == Q6_K ? 208 : 0; blocks > 0; blocks--, at += nbytes) {
    infinite |= source == MXFP4 ? *at == 255 : (at[1] & 0x7c) == 0x7c; /* all bits of the exponent are set */
    if (has_two) infinite |= (at[3] & 0x7c) == 0x7c;
  }
  return !infinite;
}

/* Fill rows from a GGUF file, reading into a buffer that fits in the L2 cache. `begin`: the offset of the matrix in the file;
   `rows`: the numbers of its rows there. Returns 0, an errno, or one of these. */
enum { CUT_OFF = -1, INFINITE = -2 };

int rows_lay_file(void *matrix, long first, long count, int source, const char *path, long begin, const int32_t *rows) {
  const Packed *a = matrix;
  const long row = a->K / block_size(source) * block_nbytes(source), panels = (1 << 18) / (ORDER * row);
  const long most = (panels > 1 ? panels : 1) * ORDER;
  uint8_t *piece = allocate(most * row);
  int file = open(path, O_RDONLY | O_CLOEXEC), result = file < 0 ? errno : 0;
  for (long j = 0, some; j < count && !result; j += some) {
    some = at_most(most, count - j);
    for (long i = 0, next; i < some && !result; i = next) { /* consecutive rows of the file */
      for (next = i + 1; next < some && rows[j + next] == rows[j + next - 1] + 1;) next++;
      for (long at = i * row, end = next * row, got; at < end && !result; at += got > 0 ? got : 0) {
        got = pread(file, piece + at, end - at, begin + rows[j + i] * row + at - i * row);
        if (got == 0) result = CUT_OFF;
        if (got < 0 && errno != EINTR) result = errno;
      }
    }
    if (!result && !are_finite(piece, some * (row / block_nbytes(source)), source)) result = INFINITE;
    if (!result) rows_lay(matrix, first + j, some, source, piece, NULL, NULL);
  }
  if (file >= 0) close(file);
  free(piece);
  return result;
}

/* --- exported functions ---------------------------------------------------------------------------------------------- */

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif
const char rows_source[65] = SOURCE_HASH; /* the hash of this library's sources (`build.py`) */

atomic_long rows_products; /* the number of products computed: `device.py` checks that MLX calls this library */

/* A forked child has no helpers, so it computes alone. */
static void hold(void) { pthread_mutex_lock(&pool.owner); }
static void let_go(void) { pthread_mutex_unlock(&pool.owner); }
static void let_go_alone(void) { threads = 1; let_go(); }

/* Start helpers, so that `wanted` threads compute. Called before the first product. Returns the number of threads. */
int rows_start(int wanted) {
  static int is_known_to_fork;
  sigset_t all, before;
  sigfillset(&all);
  pthread_mutex_lock(&pool.owner);
  if (!is_known_to_fork) pthread_atfork(hold, let_go, let_go_alone);
  is_known_to_fork = 1;
  if (threads == 1) { /* no helpers: not started yet, or lost in a fork */
    pool.asleep = 0;
    sem_init(&pool.wake, 0, 0);
    sem_init(&pool.done, 0, 0);
  }
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
  for (; threads < wanted; threads++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, helper, NULL)) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_mutex_unlock(&pool.owner);
  return threads;
}

/* `rows_read_rate`: bytes per second that `count` threads read together, each repeatedly its own part of `nbytes`. The
   fastest of `tries`, each of which takes `seconds`, because other programs can only make a try slower. */
typedef struct {
  const char *at;
  long nbytes, until, read;
} Reader;

static void *read_on(void *of) {
  enum { AT_ONCE = 8, PART = 1 << 18 }; /* vectors; bytes between two readings of the clock */
  Reader *reader = of;
  ints sum[AT_ONCE] = {{0}};
  do {
    for (long at = 0; at < reader->nbytes && nanoseconds() < reader->until; at += PART) {
      const char *part = reader->at + at, *end = part + at_most(PART, reader->nbytes - at);
      for (; part < end; part += sizeof sum, reader->read += sizeof sum)
        for (int i = 0; i < AT_ONCE; i++) sum[i] += (ints)load_words(part + i * sizeof *sum);
    }
  } while (nanoseconds() < reader->until);
  for (int i = 0; i < AT_ONCE; i++) __asm__ volatile("" : : "m"(sum[i])); /* keeps the compiler from dropping the reads */
  return NULL;
}

double rows_read_rate(long nbytes, int count, int tries, double seconds) {
  const long each = (nbytes / count / 4096 + 1) * 4096;
  char *memory = allocate(each * count);
  Reader *readers = allocate(count * sizeof *readers);
  pthread_t *helpers = allocate(count * sizeof *helpers);
  double best = 0;
  give_memory(memory, each * count);
  memset(memory, 1, each * count);
  for (; tries > 0; tries--) {
    const long began = nanoseconds(), until = began + (long)(1e9 * seconds);
    double read = 0;
    int started = 1;
    for (int i = 0; i < count; i++) readers[i] = (Reader){memory + i * each, each, until, 0};
    while (started < count && !pthread_create(&helpers[started], NULL, read_on, &readers[started])) started++;
    read_on(&readers[0]);
    for (int i = 1; i < started; i++) pthread_join(helpers[i], NULL);
    for (int i = 0; i < started; i++) read += readers[i].read;
    const double rate = 1e9 * read / (nanoseconds() - began);
    best = rate > best ? rate : best;
  }
  free(memory);
  free(readers);
  free(helpers);
  return best;
}

/* Write a `Packed` that names an operation. The `width` weights of a norm follow in the next cache line. */
void rows_operation(void *at, int form, int width, float setting) {
  Packed packed = {.key = {key[0], key[1]}, .form = form, .N = width, .setting = setting};
  memcpy(at, &packed, sizeof packed);
}

/* Write a slab's label into the end of its memory. */
void rows_slab(char *memory, int numbers, int slots, int heads, int rows, int Dh, float scale) {
  Slab slab = {.form = ATTENTION, .numbers = numbers, .slots = slots, .heads = heads, .rows = rows, .Dh = Dh, .scale = scale};
  memcpy(slab.key, key, sizeof key);
  memcpy(memory + slab_nbytes(&slab) - LINE_NBYTES, &slab, sizeof slab);
}

/* True if the packed matrix has the shape that MLX passes: with any other shape it would be read beyond its end. */
static int is_as_said(const Packed *a, const Product *p) {
  if (a->form == SOFTMAX || a->form == CAP) return p->N == p->K && is_plain(p);
  if (a->form == NORM) return p->N == p->K && p->N == a->N && is_plain(p);
  if (a->form == TURN) return p->N == p->K && p->K == a->setting && p->K % 2 == 0 && p->M % a->N == 0 && is_plain(p);
  if (is_attention(a)) {
    const long sinks = p->K - p->N - NUMBERS_OF_A_TOKEN; /* 0, or one for each head */
    return p->N % (slab_of(p)->heads * slab_of(p)->Dh) == 0 && (sinks == 0 || sinks == p->N / slab_of(p)->Dh) && is_plain(p);
  }
  if (is_delta(a))
    return p->N == (long)states_of(p)->Hv * states_of(p)->Dv &&
           p->K == inputs_of(states_of(p)) + 2 * states_of(p)->Hv + NUMBERS_OF_A_MOVE && is_plain(p);
  if (a->form == MEMORY) return p->M == 1 && p->K == 1;
  if (is_stack(a)) {
    const Stack *s = stack_of(p);
    const long k = p->N / s->N;
    return p->N % s->N == 0 && (p->K == s->K + k || p->K == k * s->K + k) && is_plain(p);
  }
  if (is_operation(a)) return p->N * 2 == p->K && is_plain(p);
  if (is_rounded(a->form) && !is_plain(p)) return 0;
  return p->N == a->N && p->K == a->K && p->ldw == p->K && !p->is_turned;
}

static void check(const Product *p) {
  const Packed *a = p->packed;
  if (!a || is_as_said(a, p)) return;
  const char *what = is_operation(a) ? "an operation" : "a packed matrix";
  fprintf(stderr, "nanobatch: %s of %ld x %ld is multiplied as %ld x %ld\n", what, (long)a->N, (long)a->K, p->N, p->K);
  abort();
}

/* The BLAS function for float32 matrices: C = alpha A B + beta C, with A and B each as stored (111) or transposed (112),
   in row-major (101) or column-major order (102). */
void cblas_sgemm(int order, int turn_a, int turn_b, int M, int N, int K, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  if (order == 102) { /* a column-major matrix is its transpose in row-major order, and (A B)^T = B^T A^T */
    cblas_sgemm(101, turn_b, turn_a, N, M, K, alpha, b, ldb, a, lda, beta, c, ldc);
    return;
  }
  if (M <= 0 || N <= 0) return;
  if (K < 0 || alpha == 0) K = 0; /* an empty sum */
  atomic_fetch_add_explicit(&rows_products, 1, memory_order_relaxed);
  float *copy = NULL;
  if (turn_a != 111 && K > 0) { /* rare: the numbers of a row are not contiguous, so they are copied */
    copy = malloc(sizeof(float) * M * K);
    if (!copy) {
      fprintf(stderr, "nanobatch: no memory for a matrix of %d x %d\n", M, K);
      abort();
    }
    for (long m = 0; m < M; m++)
      for (long k = 0; k < K; k++) copy[m * K + k] = a[k * lda + m];
    a = copy;
    lda = K;
  }
  Product product = {
    .M = M, .N = N, .K = K, .x = a, .w = b, .y = c, .ldx = lda, .ldw = ldb, .ldy = ldc,
    .alpha = alpha, .beta = beta, .is_turned = turn_b == 111,
    .packed = K > 0 ? packed_at(b) : NULL,
  };
  check(&product);
  Setting own = change_setting(USUAL);
  run(&product);
  change_setting(own);
  free(copy);
}
