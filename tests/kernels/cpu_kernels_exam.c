/* An exam for cpu_kernels.c, compiled together with it. It checks that each number is right, that a row has the same bits in
   any batch, that a product of packed weights has the same bits as one of the float32 numbers that they stand for, and that
   an operation on rows is as close to its formula as float32 allows.

       cc -O2 -ffp-contract=off cpu_kernels_exam.c ../../kernels/cpu_kernels.c -o exam -pthread -lm && ./exam [threads [bug [rounds]]]

   It prints the number of rows, packed products and operations that were compared, and how many differ or are wrong. The
   exit code is 1 if any are. Each array is exactly as long as the product may read, so that a sanitizer detects a read
   beyond its end. Several threads compute products at once, as two engines in one process would. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

void cblas_sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
int rows_start(int wanted);
void rows_pack(void *at, int form, int form_of_scales, int N, int K, int group, int scales, int offsets, float center);
long rows_width(int form, long K);
void rows_lay(void *matrix, long first, long count, int source, const uint8_t *from, const char *scales, const char *offsets);
void rows_operation(void *at, int form, int width, float setting);
void rows_stack(void *at, int experts, int N, int K, int lines, int bias);

static atomic_long compared, differ, wrong, packed, unlike, operations, off, rounded, uneven, stacks;
static atomic_ulong rounded_bits; /* the same on every processor */
int planted; /* the number of the bug to turn on in a cpu_kernels.c with planted bugs; 0: none */
static int rounds = 60;

/* Flush denormal numbers to zero in this thread, or not, as -ffast-math does. Return the previous setting. */
static int flush(int on) {
#if defined(__SSE__)
  unsigned before = _mm_getcsr();
  _mm_setcsr(on ? 0x9fc0 : 0x1f80);
  return (before & 0x8040) != 0;
#elif defined(__aarch64__)
  unsigned long before, to = (unsigned long)on << 24;
  __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, %1" : "=&r"(before) : "r"(to) : "memory");
  return (before >> 24) & 1;
#else
  return on;
#endif
}

static unsigned draw(unsigned *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

static int between(unsigned *state, int least, int most) { return least + draw(state) % (most - least + 1); }

static float *random_numbers(unsigned *state, long count, float scale) {
  float *numbers = malloc(sizeof(float) * (count ? count : 1));
  for (long i = 0; i < count; i++) numbers[i] = (draw(state) / 8388608.0f - 1) * scale;
  return numbers;
}

/* Compare x (M, K) times W, (N, K) or (K, N), with sums of doubles, and then some of its rows computed alone. */
static void examine(unsigned *state, int M, int N, int K, int turned) {
  int ldx = K + between(state, 0, 3), ldy = N + between(state, 0, 3);
  int ldw = (turned ? N : K) + between(state, 0, 3);
  int above = turned ? K : N; /* rows of W */
  int is_plain = between(state, 0, 3) > 0;
  float alpha = is_plain ? 1 : 0.7f, beta = is_plain ? 0 : 0.3f; /* powers of two would hide a rounding */
  long x_size = (long)(M - 1) * ldx + K, w_size = above ? (long)(above - 1) * ldw + (turned ? N : K) : 0;
  long y_size = (long)(M - 1) * ldy + N;
  int is_tiny = is_plain && between(state, 0, 3) == 0; /* all products of two numbers are denormal */
  int flushes = between(state, 0, 1);
  float scale = is_tiny ? 1e-20f : 1;
  float *x = random_numbers(state, x_size, scale), *w = random_numbers(state, w_size, scale);
  float *before = random_numbers(state, y_size, 1);
  float *y = malloc(sizeof(float) * y_size);
  memcpy(y, before, sizeof(float) * y_size);
  if (!beta) for (int m = 0; m < M; m++) for (int n = 0; n < N; n++) y[m * ldy + n] = NAN; /* must not be read */
  int way = between(state, 0, 2);
  flush(flushes);
  if (way == 0) cblas_sgemm(101, 111, turned ? 111 : 112, M, N, K, alpha, x, ldx, w, ldw, beta, y, ldy);
  if (way == 1) cblas_sgemm(102, turned ? 111 : 112, 111, N, M, K, alpha, w, ldw, x, ldx, beta, y, ldy);
  if (way == 2) { /* x given column by column */
    float *columns = malloc(sizeof(float) * ((long)M * K + 1));
    for (int m = 0; m < M; m++) for (int k = 0; k < K; k++) columns[(long)k * M + m] = x[(long)m * ldx + k];
    cblas_sgemm(101, 112, turned ? 111 : 112, M, N, K, alpha, columns, M, w, ldw, beta, y, ldy);
    free(columns);
  }
  if (flush(0) != flushes) atomic_fetch_add(&wrong, 1); /* the caller's setting must be kept */
  for (int m = 0; m < M; m++) for (int n = 0; n < N; n++) {
    double sum = 0, size = is_tiny ? K * 1e-38 : 1; /* the smallest numbers are 1e-45 apart */
    for (int k = 0; k < K; k++) {
      double product = (double)x[(long)m * ldx + k] * (turned ? w[(long)k * ldw + n] : w[(long)n * ldw + k]);
      sum += product;
      size += fabs(product);
    }
    double right = alpha * sum + (beta ? beta * before[(long)m * ldy + n] : 0);
    if (!(fabs(y[(long)m * ldy + n] - right) <= 1e-6 * size)) atomic_fetch_add(&wrong, 1);
  }
  for (int m = 0; m < M; m += between(state, 1, 4)) {
    float *own = malloc(sizeof(float) * (K ? K : 1)), *alone = malloc(sizeof(float) * N);
    memcpy(own, x + (long)m * ldx, sizeof(float) * K);
    memcpy(alone, before + (long)m * ldy, sizeof(float) * N);
    flush(!flushes);
    cblas_sgemm(101, 111, turned ? 111 : 112, 1, N, K, alpha, own, K, w, ldw, beta, alone, N);
    flush(0);
    atomic_fetch_add(&compared, 1);
    if (memcmp(alone, y + (long)m * ldy, sizeof(float) * N)) atomic_fetch_add(&differ, 1);
    free(own);
    free(alone);
  }
  free(x);
  free(w);
  free(before);
  free(y);
}

static void draw_and_examine(unsigned *state, int most_M, int most_N, int most_K, int turned) {
  int M = between(state, 1, most_M);
  int N = between(state, 1, most_N);
  int K = between(state, 1, most_K);
  examine(state, M, N, K, turned);
}

/* --- packed weights ------------------------------------------------------------------------------------------------ */

enum { FLOAT32, FLOAT16, BFLOAT16, FOUR_BITS, EIGHT_BITS, ROUNDED_4, ROUNDED_5, ROUNDED_6, ROUNDED_8, ROUNDED_MXFP4, SOFTMAX, SWIGLU, GEGLU, NORM, CAP };

/* Return the value of a number of 16 bits by its definition, without a trick that cpu_kernels.c might share. */
static float value(int form, unsigned bits) {
  int places = form == FLOAT16 ? 10 : 7, bias = form == FLOAT16 ? 15 : 127;
  int exponent = bits >> places & (form == FLOAT16 ? 31 : 255), rest = bits & ((1 << places) - 1);
  double size = exponent ? ldexp(rest + (1 << places), exponent - bias - places) : ldexp(rest, 1 - bias - places);
  return bits >> 15 ? -size : size;
}

/* Draw finite 16-bit numbers: small ones, some of them denormal. */
static void *random_form(unsigned *state, int form, long count, float *values) {
  if (form == FLOAT32) {
    float *numbers = random_numbers(state, count, 1);
    memcpy(values, numbers, sizeof(float) * count);
    return numbers;
  }
  uint16_t *numbers = malloc(2 * count + 2);
  for (long i = 0; i < count; i++) {
    numbers[i] = form == FLOAT16 ? draw(state) & 0xbfff : (draw(state) & 0x83ff) | 0x3c00;
    if (draw(state) % 50 == 0) numbers[i] &= 0x80ff;
    values[i] = value(form, numbers[i]);
  }
  return numbers;
}

static long lines(long nbytes) { return (nbytes + 63) / 64; }

/* Compare x (M, K) times a packed W (N, K) with the float32 numbers that W stands for. */
static void examine_packed(unsigned *state, int M, int N, int K, int form, int group, int form_of_scales) {
  int bits = form == FOUR_BITS ? 4 : form == EIGHT_BITS ? 8 : 16, has_offsets = bits < 16;
  int nbytes = form_of_scales == FLOAT32 ? 4 : 2, lda = K + between(state, 0, 3), ldy = N + between(state, 0, 3);
  long count = (long)N * K, groups = count / group;
  float *wide = malloc(sizeof(float) * count), *scale = malloc(4 * groups), *offset = malloc(4 * groups);
  void *scales = random_form(state, form_of_scales, groups, scale);
  void *offsets = random_form(state, form_of_scales, groups, offset);
  long at_scales = 1 + lines(N * rows_width(form, K)), at_offsets = at_scales + lines(groups * nbytes);
  char *w = malloc(64 * (has_offsets ? at_offsets : at_scales) + groups * nbytes + 64); /* one vector, not a byte more */
  rows_pack(w, form, form_of_scales, N, K, group, at_scales, has_offsets ? at_offsets : 0, 0);
  if (bits == 16) {
    void *numbers = random_form(state, form, count, wide);
    rows_lay(w, 0, N, 16, numbers, scales, NULL);
    for (long i = 0; i < count; i++) wide[i] *= scale[i / group];
    free(numbers);
  } else {
    int narrow = bits == 4 ? between(state, 0, 1) ? 4 : 2 : (int[]){3, 5, 6, 8}[between(state, 0, 3)];
    uint8_t *from = malloc(count * narrow / 8);
    for (long i = 0; i < count * narrow / 8; i++) from[i] = draw(state);
    const int some = between(state, 0, N); /* in two parts; the second may start anywhere */
    rows_lay(w, some, N - some, narrow, from + (long)some * K * narrow / 8, (char *)scales + (long)some * K / group * nbytes,
             (char *)offsets + (long)some * K / group * nbytes);
    rows_lay(w, 0, some, narrow, from, scales, offsets);
    for (long i = 0; i < count; i++) {
      int number = 0;
      for (int bit = 0; bit < narrow; bit++) {
        long at = i * narrow + bit;
        number |= (from[at / 8] >> at % 8 & 1) << bit;
      }
      volatile float product = number * scale[i / group]; /* rounded here and again below */
      wide[i] = product + offset[i / group];
    }
    free(from);
  }

  int is_plain = between(state, 0, 3) > 0;
  float alpha = is_plain ? 1 : 0.7f, beta = is_plain ? 0 : 0.3f;
  float *x = random_numbers(state, (long)(M - 1) * lda + K, 1), *y = random_numbers(state, (long)(M - 1) * ldy + N, 1);
  float *like = malloc(sizeof(float) * ((long)(M - 1) * ldy + N));
  memcpy(like, y, sizeof(float) * ((long)(M - 1) * ldy + N));
  cblas_sgemm(101, 111, 112, M, N, K, alpha, x, lda, wide, K, beta, like, ldy);
  if (between(state, 0, 1)) cblas_sgemm(101, 111, 112, M, N, K, alpha, x, lda, (float *)w, K, beta, y, ldy);
  else cblas_sgemm(102, 112, 111, N, M, K, alpha, (float *)w, K, x, lda, beta, y, ldy);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      if (memcmp(y + (long)m * ldy + n, like + (long)m * ldy + n, sizeof(float))) atomic_fetch_add(&unlike, 1);
  atomic_fetch_add(&packed, 1);
  void *all[] = {wide, scale, offset, scales, offsets, w, x, y, like};
  for (int i = 0; i < 9; i++) free(all[i]);
}

static void draw_and_examine_packed(unsigned *state, int M, int most_N, int most_K) {
  int N = between(state, 1, most_N), form = between(state, FLOAT16, EIGHT_BITS);
  if (form < FOUR_BITS) {
    int K = between(state, 16, most_K);
    examine_packed(state, M, N, K, form, K, FLOAT32);
  } else {
    int group = 32 << between(state, 0, 2);
    examine_packed(state, M, N, group * between(state, 1, most_K / group), form, group, between(state, FLOAT32, BFLOAT16));
  }
}

/* Compare M rows of 8 bits with sums of doubles, and then one by one. The largest number of each group is 127, so that
   rounding changes nothing. */
static void examine_rounded(unsigned *state, int form, int M, int N, int groups) {
  const int bits = (int[]){4, 5, 6, 8}[form - ROUNDED_4], group = form == ROUNDED_6 ? 16 << between(state, 0, 1) : 32 << between(state, 0, 2);
  const int K = groups * group, rows = (N + 15) / 16 * 16, has_offsets = between(state, 0, 1);
  const long count = (long)rows * K, factors = (long)N * groups;
  const int at_scales = 1 + lines(rows * rows_width(form, K)), at_offsets = at_scales + lines(4L * rows * groups);
  const float center = has_offsets ? 0 : -(1 << (bits - 1));
  uint8_t *from = calloc(count + 1, 1), *w = aligned_alloc(64, 64L * (at_offsets + lines(4L * rows * groups) + 1));
  float *x = random_numbers(state, (long)M * K, 1), *y = malloc(sizeof(float) * M * N), *own = malloc(sizeof(float) * N);
  for (long i = 0; i < (long)N * K * bits / 8; i++) from[i] = draw(state);
  float *scales = malloc(4 * factors), *offsets = malloc(4 * factors);
  for (long i = 0; i < factors; i++) scales[i] = (draw(state) % 1000 - 500.0f) / 500;
  for (long i = 0; i < factors; i++) offsets[i] = has_offsets ? (draw(state) % 1000 - 500.0f) / 50 : 0;
  rows_pack(w, form, FLOAT32, N, K, group, at_scales, has_offsets ? at_offsets : at_scales, center);
  rows_lay(w, 0, N, bits, from, (char *)scales, has_offsets ? (char *)offsets : NULL);
  for (long i = 0; i < (long)M * K; i++) x[i] = i % (group < 32 ? group : 32) ? between(state, -127, 127) : 127;
  cblas_sgemm(101, 111, 112, M, N, K, 1, x, K, (float *)w, K, 0, y, N);
  for (int m = 0; m < M; m++) {
    for (int n = 0; n < N; n++) {
      double sum = 0, size = 0;
      for (int k = 0; k < K; k++) {
        long bit = ((long)n * K + k) * bits, factor = (long)n * groups + k / group;
        int number = (from[bit / 8] | from[bit / 8 + 1] << 8) >> bit % 8 & ((1 << bits) - 1);
        double weight = number * scales[factor] + (has_offsets ? offsets[factor] : scales[factor] * center);
        sum += x[(long)m * K + k] * weight;
        size += fabs(x[(long)m * K + k]) * (number + 256) * (fabs(scales[factor]) + fabs(offsets[factor]));
      }
      if (!(fabs(y[(long)m * N + n] - sum) <= 1e-6 * size)) atomic_fetch_add(&uneven, 1);
    }
    cblas_sgemm(101, 111, 112, 1, N, K, 1, x + (long)m * K, K, (float *)w, K, 0, own, N);
    if (memcmp(own, y + (long)m * N, sizeof(float) * N)) atomic_fetch_add(&uneven, 1);
    for (int n = 0; n < N; n++) {
      uint32_t number;
      memcpy(&number, own + n, 4);
      atomic_fetch_add(&rounded_bits, (unsigned long)number * (2 * n + 1));
    }
  }
  atomic_fetch_add(&rounded, 1);
  void *all[] = {from, w, x, y, own, scales, offsets};
  for (int i = 0; i < 7; i++) free(all[i]);
}

/* Compare M rows, each with k experts of a stack, with the same products one by one. */
static void examine_experts(unsigned *state, int form, int M, int N, int groups) {
  enum { EXPERTS = 3, GROUP = 32 };
  const int k = between(state, 1, 3), is_apart = between(state, 0, 1), has_bias = between(state, 0, 1), K = groups * GROUP;
  const int rows = form == ROUNDED_4 ? (N + 15) / 16 * 16 : N, bits = form == FLOAT32 ? 32 : 4, group = bits == 4 ? GROUP : K;
  const int own = is_apart ? k * K : K, ldx = own + k + between(state, 0, 3), ldy = k * N + between(state, 0, 3);
  const long factors = bits == 4 ? lines(4L * rows * groups) : 0, at_scales = 1 + lines(rows * rows_width(form, K));
  const long at_bias = at_scales + 2 * factors, next = at_bias + lines(4L * N);
  char *stack = aligned_alloc(64, 64 * (2 + EXPERTS * next)), *first = stack + 64;
  rows_stack(stack, EXPERTS, N, K, next, has_bias ? at_bias : 0);
  for (int e = 0; e < EXPERTS; e++) {
    char *w = first + 64 * e * next;
    float *numbers = random_numbers(state, (long)N * K, 1), *scales = random_numbers(state, (long)N * groups, 1);
    float *bias = random_numbers(state, N, 1);
    rows_pack(w, form, FLOAT32, N, K, group, at_scales, at_scales + factors, 0);
    rows_lay(w, 0, N, bits, (uint8_t *)numbers, bits == 4 ? (char *)scales : NULL, bits == 4 ? (char *)scales : NULL);
    memcpy(w + 64 * at_bias, bias, 4L * N);
    free(numbers), free(scales), free(bias);
  }
  float *x = random_numbers(state, (long)(M - 1) * ldx + own + k, 1), *y = random_numbers(state, (long)(M - 1) * ldy + k * N, 1);
  float *alone = malloc(sizeof(float) * N);
  for (int m = 0; m < M; m++)
    for (int i = 0; i < k; i++) x[(long)m * ldx + own + i] = between(state, 0, EXPERTS - 1);
  cblas_sgemm(101, 111, 112, M, k * N, own + k, 1, x, ldx, (float *)stack, own + k, 0, y, ldy);
  for (int m = 0; m < M; m++)
    for (int i = 0; i < k; i++) {
      const char *w = first + 64 * (long)x[(long)m * ldx + own + i] * next;
      const float *bias = (const float *)(w + 64 * at_bias);
      cblas_sgemm(101, 111, 112, 1, N, K, 1, x + (long)m * ldx + is_apart * i * K, K, (float *)(form == FLOAT32 ? w + 64 : w), K, 0, alone, N);
      for (int n = 0; n < N; n++) {
        const float sum = has_bias ? alone[n] + bias[n] : alone[n];
        if (memcmp(&sum, y + (long)m * ldy + i * N + n, sizeof sum)) atomic_fetch_add(&uneven, 1);
      }
    }
  atomic_fetch_add(&stacks, 1);
  free(stack), free(x), free(y), free(alone);
}

/* --- operations on rows -------------------------------------------------------------------------------------------- */

/* Compute an operation on one row in doubles, and the allowed error of float32. */
static void define(int form, long N, const float *x, const float *weight, float setting, double *right, double *most_off) {
  double sum = 0, largest = -INFINITY, squares = 0;
  for (long n = 0; n < N; n++) largest = x[n] > largest ? x[n] : largest;
  for (long n = 0; n < N; n++) sum += exp(setting * (x[n] - largest));
  for (long n = 0; n < N; n++) squares += (double)x[n] * x[n];
  for (long n = 0; n < N; n++) {
    double g = x[n], v = form == SWIGLU ? g : sqrt(8 / acos(-1)) * (g + 0.044715 * g * g * g);
    if (form == SOFTMAX) right[n] = exp(setting * (g - largest)) / sum;
    if (form == NORM) right[n] = g / sqrt(squares / N + setting) * weight[n];
    if (form == SWIGLU || form == GEGLU) right[n] = g / (1 + exp(-v)) * x[N + n];
    if (form == CAP) right[n] = setting * tanh(g / setting);
    double size = fabs(right[n]), place = size < 0x1p-126 ? 0x1p-149 : 0x1p-23 * exp2(floor(log2(size)));
    most_off[n] = form == SOFTMAX ? 0x1p-22 : 4 * place;
    if (form == SWIGLU) most_off[n] += 0x1p-149 * fabs(x[N + n]); /* silu is rounded before it is multiplied */
    if (form == GEGLU) most_off[n] += 0x1p-22 * fabs(x[N + n]);
  }
}

static void operate(int form, int M, int N, int K, float *x, int ldx, float *w, float *y, int ldy) {
  if (N == 1 && K == 1) cblas_sgemm(101, 111, 111, M, N, K, 1, x, ldx, w, N, 0, y, ldy); /* as MLX takes it */
  else cblas_sgemm(101, 111, 112, M, N, K, 1, x, ldx, w, K, 0, y, ldy);
}

/* Compare M rows with the formula, and then one by one: a softmax with more masked numbers, and each row with a NaN. */
static void examine_operation(unsigned *state, int form, int M, int N) {
  int is_gate = form == SWIGLU || form == GEGLU, K = is_gate ? 2 * N : N;
  int is_alone = is_gate || form == CAP; /* elementwise, so a NaN affects nothing else */
  int ldx = K + between(state, 0, 3), ldy = N + between(state, 0, 3), flushes = between(state, 0, 1);
  float setting = (1 + draw(state) % 1000) / 1000.0f;
  float scale = (float[]){1, 10, 100}[between(state, 0, 2)];
  float *x = random_numbers(state, (long)(M - 1) * ldx + K, scale), *y = random_numbers(state, (long)(M - 1) * ldy + N, 1);
  float *w = malloc(64 + sizeof(float) * (form == NORM ? N : 0)), *weight = random_numbers(state, N, 2);
  double *right = malloc(sizeof(double) * N), *most_off = malloc(sizeof(double) * N);
  if (form == NORM) memcpy(w + 16, weight, sizeof(float) * N);
  rows_operation(w, form, N, setting);
  for (int m = 0; form == SOFTMAX && m < M; m++) /* the first is never masked */
    for (int n = 1; n < N; n++) if (between(state, 0, 2) == 0) x[(long)m * ldx + n] = -INFINITY;
  flush(flushes);
  operate(form, M, N, K, x, ldx, w, y, ldy);
  flush(0);
  for (int m = 0; m < M; m++) {
    float *own = x + (long)m * ldx, *result = y + (long)m * ldy;
    define(form, N, own, weight, setting, right, most_off);
    for (int n = 0; n < N; n++) {
      int is_hidden = form == SOFTMAX && isinf(own[n]);
      if (!(fabs(result[n] - right[n]) <= (is_hidden ? 0 : most_off[n]))) atomic_fetch_add(&off, 1);
    }
    int far = form == SOFTMAX ? between(state, 0, 40) : 0, lost = between(state, 0, K - 1);
    float *alone = malloc(sizeof(float) * (K + far)), *again = malloc(sizeof(float) * (N + far));
    memcpy(alone, own, sizeof(float) * K);
    for (int n = 0; n < far; n++) alone[K + n] = -INFINITY;
    flush(!flushes);
    operate(form, 1, N + far, K + far, alone, K + far, w, again, N + far);
    flush(0);
    if (memcmp(again, result, sizeof(float) * N)) atomic_fetch_add(&off, 1);
    for (int n = N; n < N + far; n++) if (again[n] != 0) atomic_fetch_add(&off, 1);
    alone[lost] = NAN;
    operate(form, 1, N + far, K + far, alone, K + far, w, again, N + far);
    for (int n = 0; n < N + far; n++)
      if (isnan(again[n]) != (is_alone ? n == lost % N : 1)) atomic_fetch_add(&off, 1);
    free(alone);
    free(again);
  }
  atomic_fetch_add(&operations, 1);
  void *all[] = {x, y, w, weight, right, most_off};
  for (int i = 0; i < 6; i++) free(all[i]);
}

/* With a planted bug, the first fault is enough. */
static int is_over(void) { return planted && (differ || wrong || unlike || off || uneven); }

static void *student(void *seed) {
  unsigned state = *(unsigned *)seed * 2654435761u;
  int is_short = rounds < 10; /* for a sanitizer */
  for (int i = 0; i < rounds && !is_over(); i++)
    for (int turned = 0; turned < 2; turned++) {
      draw_and_examine(&state, 40, 70, 150, turned);
      draw_and_examine(&state, 9, 1500, 150, turned); /* computed in shares */
      examine(&state, 1 + i % 3, 5, 0, turned);     /* nothing is added up */
      draw_and_examine_packed(&state, between(&state, 1, 40), 70, 400);
      draw_and_examine_packed(&state, between(&state, 1, 14), 700, 300); /* computed in shares */
    }
  for (int form = SOFTMAX; form <= CAP && !is_over(); form++) {
    for (int N = 1; N < 40; N += is_short ? 6 : 1) examine_operation(&state, form, between(&state, 1, 5), N);
    examine_operation(&state, form, 3, is_short ? 500 : 5000);
    examine_operation(&state, form, 300, 300); /* computed in shares */
  }
  for (int i = 0; i < (is_short ? 2 : 20) && !is_over(); i++)
    draw_and_examine_packed(&state, between(&state, 1, 150), 30, 3000); /* cut along K */
  for (int M = 1; M <= 3; M++) /* more groups than are made float32 at a time */
    for (int form = FOUR_BITS; form <= EIGHT_BITS && !is_over(); form++) examine_packed(&state, M, 9, 2560, form, 32, M - 1);
  for (int form = ROUNDED_4; form <= ROUNDED_8 && !is_over(); form++)
    for (int M = 1; M <= (is_short ? 9 : 20); M += is_short ? 4 : 1) {
      unsigned own = *(unsigned *)seed * 100 + M; /* compilers call two functions in any order */
      const int N = between(&own, 1, 60), groups = between(&own, 1, 6);
      examine_rounded(&own, form, M, N, groups);
    }
  for (int form = FLOAT32; form <= ROUNDED_4 && !is_over(); form++)
    for (int M = 1; M < 100 && (form == FLOAT32 || form == FOUR_BITS || form == ROUNDED_4); M += is_short ? 90 : 11)
      examine_experts(&state, form, M, between(&state, 1, 200), between(&state, 1, 9));
  for (int M = 1; M <= 33 && !is_over(); M += is_short ? 32 : 8) examine(&state, M, 400, 288, 0);
  if (!is_over()) examine(&state, 130, 64, 70, 1); /* cut by rows */
  return NULL;
}

int main(int count, char **arguments) {
  rows_start(count > 1 ? atoi(arguments[1]) : 3);
  if (count > 2) planted = atoi(arguments[2]);
  if (count > 3) rounds = atoi(arguments[3]);
  pthread_t threads[3];
  unsigned seeds[3] = {1, 2, 3};
  for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, student, &seeds[i]);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  printf("%ld rows compared, %ld differ, %ld numbers wrong\n", (long)compared, (long)differ, (long)wrong);
  printf("%ld packed products compared, %ld numbers differ\n", (long)packed, (long)unlike);
  printf("%ld products of 8 bits compared, %ld numbers differ; bits %lx\n", (long)rounded, (long)uneven, (unsigned long)rounded_bits);
  printf("%ld products of experts compared\n", (long)stacks);
  printf("%ld operations looked at, %ld numbers wrong\n", (long)operations, (long)off);
  return differ || wrong || unlike || off || uneven || rounded < 36 || stacks < 18 || compared < 16 * rounds || packed < 11 * rounds || operations < 100;
}
