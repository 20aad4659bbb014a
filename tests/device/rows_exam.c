/* An exam for rows.c, compiled together with it: is each number right, and does a row have the same bits in any company?

       cc -O2 -ffp-contract=off rows_exam.c ../../parts/device/rows.c -o exam -pthread -lm && ./exam

   It prints how many rows were compared and how many differ, and exits with 1 if any do, or if a number is wrong. Each
   array is exactly as long as the product may read, so that a sanitizer sees a read beyond its end. Several threads ask
   for products at once, as two engines in one process would. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void cblas_sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
int rows_start(int wanted);

static atomic_long compared, differ, wrong;

static unsigned draw(unsigned *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

static int between(unsigned *state, int least, int most) { return least + draw(state) % (most - least + 1); }

static float *random_numbers(unsigned *state, long count) {
  float *numbers = malloc(sizeof(float) * (count ? count : 1));
  for (long i = 0; i < count; i++) numbers[i] = draw(state) / 8388608.0f - 1;
  return numbers;
}

/* x (M, K) and W, (N, K) or (K, N), against sums of doubles; then some of its rows by themselves. */
static void examine(unsigned *state, int M, int N, int K, int turned) {
  int ldx = K + between(state, 0, 3), ldy = N + between(state, 0, 3);
  int ldw = (turned ? N : K) + between(state, 0, 3);
  int above = turned ? K : N; /* rows of W */
  int is_plain = between(state, 0, 3) > 0;
  float alpha = is_plain ? 1 : 0.7f, beta = is_plain ? 0 : 0.3f; /* powers of two would hide a rounding */
  long x_size = (long)(M - 1) * ldx + K, w_size = above ? (long)(above - 1) * ldw + (turned ? N : K) : 0;
  long y_size = (long)(M - 1) * ldy + N;
  float *x = random_numbers(state, x_size), *w = random_numbers(state, w_size), *before = random_numbers(state, y_size);
  float *y = malloc(sizeof(float) * y_size);
  memcpy(y, before, sizeof(float) * y_size);
  if (!beta) for (int m = 0; m < M; m++) for (int n = 0; n < N; n++) y[m * ldy + n] = NAN; /* must not be read */
  int way = between(state, 0, 2);
  if (way == 0) cblas_sgemm(101, 111, turned ? 111 : 112, M, N, K, alpha, x, ldx, w, ldw, beta, y, ldy);
  if (way == 1) cblas_sgemm(102, turned ? 111 : 112, 111, N, M, K, alpha, w, ldw, x, ldx, beta, y, ldy);
  if (way == 2) { /* x given column by column */
    float *columns = malloc(sizeof(float) * ((long)M * K + 1));
    for (int m = 0; m < M; m++) for (int k = 0; k < K; k++) columns[(long)k * M + m] = x[(long)m * ldx + k];
    cblas_sgemm(101, 112, turned ? 111 : 112, M, N, K, alpha, columns, M, w, ldw, beta, y, ldy);
    free(columns);
  }
  for (int m = 0; m < M; m++) for (int n = 0; n < N; n++) {
    double sum = 0, size = 1;
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
    cblas_sgemm(101, 111, turned ? 111 : 112, 1, N, K, alpha, own, K, w, ldw, beta, alone, N);
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

static void *student(void *seed) {
  unsigned state = *(unsigned *)seed * 2654435761u;
  for (int i = 0; i < 60; i++)
    for (int turned = 0; turned < 2; turned++) {
      draw_and_examine(&state, 40, 70, 150, turned);
      draw_and_examine(&state, 9, 1500, 150, turned); /* computed in shares */
      examine(&state, 1 + i % 3, 5, 0, turned);     /* nothing is added up */
    }
  for (int M = 1; M <= 33; M += 8) examine(&state, M, 400, 288, 0);
  examine(&state, 130, 64, 70, 1); /* cut by rows */
  return NULL;
}

int main(int count, char **arguments) {
  rows_start(count > 1 ? atoi(arguments[1]) : 3);
  pthread_t threads[3];
  unsigned seeds[3] = {1, 2, 3};
  for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, student, &seeds[i]);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  printf("%ld rows compared, %ld differ, %ld numbers wrong\n", (long)compared, (long)differ, (long)wrong);
  return differ || wrong || compared < 1000;
}
