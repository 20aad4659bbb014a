/* Mixtures of experts, included by `cpu_kernels.c`: each row is multiplied by k matrices of a stack.

   A row names its k experts. Row by row, an expert's weights would be read from memory and unpacked again for each row that
   names it. So the pairs of a row and an expert are sorted by expert. The pairs of one expert are a *run*, and a run is one
   product, which reads the weights once for all its rows.

   The invariant: a run is computed by the functions of `cpu_kernels.c`, where the bits of a row do not depend on the number
   of rows. So they do not depend on which other rows named the same expert.

   A row of x has K numbers, or K for each of its k experts, followed by k numbers that name the experts. Its result has N
   numbers for each expert. In place of a matrix there is a `Stack`, followed by its matrices: each is a `Packed` with its
   weights, and an optional bias. A unit of work is some columns of a run. */

typedef struct {
  uint64_t key[2];
  int32_t form, experts;
  int64_t N, K;        /* of each matrix */
  int32_t lines, bias; /* cache lines from a matrix to the next, and to its float32 bias; 0 if it has no bias */
} Stack;
_Static_assert(sizeof(Stack) <= LINE_NBYTES && offsetof(Stack, form) == offsetof(Packed, form), "told apart by its form");

struct Runs {
  long k, apart;         /* experts of a row; the distance in x from one expert's input to the next: 0 or K */
  long count, chunks;    /* the number of runs; chunks of columns in each */
  long *experts, *first; /* the expert and the first pair of each run; after the last run, the number of pairs */
  long *pairs;           /* sorted by expert; pair i belongs to row i / k */
};

INLINE int is_stack(const Packed *a) { return a && a->form == EXPERTS; }
INLINE const Stack *stack_of(const Product *p) { return (const Stack *)p->packed; }
INLINE const Packed *matrix_of(const Stack *s, long expert) { return (const Packed *)line((const Packed *)s, 1 + expert * s->lines); }

/* The input of a pair. */
INLINE const float *x_of(const Product *p, long pair) {
  const Runs *runs = p->runs;
  return p->x + pair / runs->k * p->ldx + pair % runs->k * runs->apart;
}

static long expert_of(const Product *p, long pair) {
  const long k = p->runs->k;
  const float expert = p->x[pair / k * p->ldx + p->K - k + pair % k];
  if (0 <= expert && expert < stack_of(p)->experts) return (long)expert;
  fprintf(stderr, "nanobatch: there is no expert %g\n", expert);
  abort();
}

/* Sort the pairs of a row and an expert. */
static void find_runs(Product *p, Runs *runs) {
  const Stack *s = stack_of(p);
  const long k = p->N / s->N, pairs = p->M * k, experts = s->experts;
  long *memory = allocate((pairs + 3 * (experts + 1)) * sizeof *memory), *next = memory + pairs; /* the place of an expert's next pair */
  *runs = (Runs){.k = k, .apart = p->K == s->K + k ? 0 : s->K, .pairs = memory, .first = next + experts + 1};
  runs->experts = runs->first + experts + 1;
  p->runs = runs;
  memset(next, 0, (experts + 1) * sizeof *next);
  for (long pair = 0; pair < pairs; pair++) next[expert_of(p, pair) + 1]++;
  for (long e = 0; e < experts; e++) {
    if (next[e + 1]) {
      runs->experts[runs->count] = e;
      runs->first[runs->count++] = next[e];
    }
    next[e + 1] += next[e];
  }
  runs->first[runs->count] = pairs;
  for (long pair = 0; pair < pairs; pair++) runs->pairs[next[expert_of(p, pair)]++] = pair;
}

/* The `Product` of a run, without x and y. */
static Product run_product(const Product *p, long run) {
  const Stack *s = stack_of(p);
  const Packed *a = matrix_of(s, p->runs->experts[run]);
  const long first = p->runs->first[run];
  Product own = {.M = p->runs->first[run + 1] - first, .N = s->N, .K = s->K, .alpha = 1, .packed = a};
  if (a->form == FLOAT32) {
    own.packed = NULL;
    own.w = (const float *)line(a, 1);
    own.ldw = s->K;
  }
  if (p->strips) {
    own.strips = (int8_t *)p->strips + first * s->K;
    own.steps = p->steps + first * steps_of(a);
  }
  return own;
}

/* Round a share of the pairs to 8 bits. Each run has its own strips. */
static void round_pairs(const Product *p, long share, long shares) {
  const Runs *runs = p->runs;
  const long all = runs->first[runs->count], from = all * share / shares, to = all * (share + 1) / shares;
  for (long run = 0; run < runs->count; run++) {
    const long first = runs->first[run], last = at_most(runs->first[run + 1], to);
    Product own = run_product(p, run);
    for (long i = from > first ? from : first; i < last; i++) {
      own.x = x_of(p, runs->pairs[i]); /* with an `ldx` of 0, every row index has this x */
      round_rows(&own, i - first, i - first + 1);
    }
  }
}

static void multiply_run(const Product *p, long unit) {
  const Runs *runs = p->runs;
  const Stack *s = stack_of(p);
  const long run = unit / runs->chunks, chunk = unit % runs->chunks, lines = (s->N + LINE - 1) / LINE;
  const long j0 = lines * chunk / runs->chunks * LINE, j1 = at_most(lines * (chunk + 1) / runs->chunks * LINE, s->N);
  const long *pairs = runs->pairs + runs->first[run], width = (j1 - j0 + LINE - 1) / LINE * LINE;
  const float *bias = s->bias ? (const float *)line(matrix_of(s, runs->experts[run]), s->bias) + j0 : NULL;
  Product own = run_product(p, run);
  const long M = own.M, K = (s->K + LINE - 1) / LINE * LINE;
  float *y = scratch(M * width + (own.strips ? 0 : 2 * M * K)), *x = y + M * width;
  own.y = y - j0;
  own.ldy = width;
  if (!own.strips) {
    for (long m = 0; m < M; m++) memcpy(x + m * K, x_of(p, pairs[m]), s->K * sizeof *x);
    own.x = x;
    own.ldx = K;
    if (needs_strips(&own)) {
      own.strips = x + M * K;
      make_strips(&own, 0, M);
    }
  }
  multiply(&own, 0, M, j0, j1);
  for (long m = 0; m < M; m++, y += width) {
    for (long j = 0; bias && j < j1 - j0; j++) y[j] += bias[j];
    memcpy(p->y + pairs[m] / runs->k * p->ldy + pairs[m] % runs->k * s->N + j0, y, (j1 - j0) * sizeof *y);
  }
}
