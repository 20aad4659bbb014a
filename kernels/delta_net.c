/* The gated delta rule, included by `cpu_kernels.c`: layers that keep a matrix instead of keys and values.

   A head of such a layer has one matrix S, (Dk, Dv). A token with key k, query q, value v, gate g and rate b updates S and
   then reads it:

       d = b (v - g S^T k)        S <- g S + k d^T        y = S^T q

   The update is applied one token late. With the previous S, y is g S^T q + (q k) d, so one pass over S yields S^T k and
   S^T q, and the same pass applies the update of the previous token. The updates (k, d, g) that are not applied yet are the
   log.

   q, k and v are mixed with those of the three previous tokens (a convolution), and q and k are normalized. This is done
   here, too, because a token needs its predecessors. The gate is g = exp(-exp(A) log(1 + exp(a + dt))), the rate is
   b = 1 / (1 + exp(-beta)).

   In place of a weight matrix there are a layer's `States`: places, each with the S of all heads after `base` tokens, and
   rings with the log and the inputs of the newest tokens. A row of x is a token: its inputs, a and beta of each value head,
   and a move of five numbers. The token is number `ROW` of its sequence. The sequence continues from place `FROM`, which
   has the S after `BASE` tokens, and the S after `KEEP` tokens goes to place `TO`. So a sequence may continue from any token
   in the log of its place, and rejected draft tokens leave no trace.

   The invariant: each number of S is one chain of operations, token by token, and each sum over S runs from its first row
   to its last. So the bits do not depend on the split into chunks, on where drafts began, or on the width of vectors. A
   unit of work is one key head of one sequence. */

enum { FROM, BASE, ROW, TO, KEEP, NUMBERS_OF_A_MOVE }; /* FROM is -1 at the start of a sequence */
enum { TAPS = 4 };

typedef struct {
  uint32_t key[4];
  int32_t form, slots, places; /* DELTA; the first places belong to slots, the others are checkpoints */
  int32_t log;                 /* updates in the log of a slot's place; a checkpoint has one */
  int32_t Hk, Hv, Dk, Dv;      /* heads of keys and of values; Hv / Hk of these share a key head */
  const float *weights;        /* TAPS rows for the inputs; then A and dt of each value head */
} States;
_Static_assert(sizeof(States) <= LINE_NBYTES && offsetof(States, form) == offsetof(Packed, form), "told apart by its form");

INLINE int is_delta(const Packed *a) { return a && a->form == DELTA; }
INLINE const States *states_of(const Product *p) { return (const States *)p->packed; }
INLINE long inputs_of(const States *s) { return 2L * s->Hk * s->Dk + (long)s->Hv * s->Dv; }
INLINE long move_of(const Product *p, long m, int which) {
  return (long)p->x[m * p->ldx + inputs_of(states_of(p)) + 2 * states_of(p)->Hv + which];
}

/* The size of a place: S, then rings with the inputs and the updates of the newest tokens. */
static long place_size(const States *s, long log) {
  const long change = (long)s->Hk * s->Dk + (long)s->Hv * s->Dv + s->Hv;
  const long size = (long)s->Hv * s->Dk * s->Dv + (log + TAPS - 1) * inputs_of(s) + log * change;
  return (size + LINE - 1) / LINE * LINE; /* places and the label begin at cache lines */
}
static long states_size(const States *s) {
  return s->slots * place_size(s, s->log) + (s->places - s->slots) * place_size(s, 1);
}

typedef struct {
  long log;                                       /* the length of the rings; the ring of inputs has TAPS - 1 more */
  float *S, *inputs, *keys, *differences, *gates; /* S of each value head; rings with a row of inputs, k, d, g per token */
} Place;

static Place place_of(const States *s, long place) {
  const long own = at_most(place, s->slots), log = place < s->slots ? s->log : 1;
  Place found = {.log = log, .S = (float *)s - states_size(s) + own * place_size(s, s->log) + (place - own) * place_size(s, 1)};
  found.inputs = found.S + (long)s->Hv * s->Dk * s->Dv;
  found.keys = found.inputs + (log + TAPS - 1) * inputs_of(s);
  found.differences = found.keys + log * s->Hk * s->Dk;
  found.gates = found.differences + log * s->Hv * s->Dv;
  return found;
}
static float *inputs_at(const States *s, const Place *place, long row) {
  return place->inputs + row % (place->log + TAPS - 1) * inputs_of(s);
}

/* The end of the sequence that begins at row m: the tokens of a sequence are consecutive. */
static long sequence_end(const Product *p, long m) {
  long end = m + 1;
  while (end < p->M && move_of(p, end, TO) == move_of(p, m, TO)) end++;
  return end;
}

/* e^x and log(1 + x) in doubles and without fused operations, for the same bits on every processor, which C libraries do
   not guarantee. x is clamped to -700..700 for e^x, and must be in 0..1 for the logarithm. Both are more precise than a
   float32. */
static double exponential(double x) {
  const double large = 0x1.8p52; /* so large that a sum with it is rounded to an integer */
  x = x < -700 ? -700 : x > 700 ? 700 : x;
  const double shifted = x * 0x1.71547652b82fep0 + large, n = shifted - large; /* e^x = 2^n e^rest */
  const double rest = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  double sum = 1, power;
  for (int i = 13; i > 0; i--) sum = 1 + sum * rest * (1. / i);
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52; /* the last bits of `shifted` are n */
  memcpy(&power, &bits, sizeof power);
  return sum * power;
}
static double logarithm_of_1_plus(double x) { /* 2 artanh(x / (2 + x)), as a series */
  const double z = x / (2 + x);
  double sum = 0;
  for (int i = 27; i > 0; i -= 2) sum = sum * z * z + 1. / i;
  return 2 * z * sum;
}

static float gate_of(float a, float dt, float A) {
  const double x = (double)a + dt, size = x < 0 ? -x : x;
  const double softplus = (x > 0 ? x : 0) + logarithm_of_1_plus(exponential(-size));
  return (float)exponential(-exponential(A) * softplus);
}
static float rate_of(float beta) { return (float)(1 / (1 + exponential(-(double)beta))); }

/* The convolution and its silu, for `count` inputs from `first` on; `before` has the inputs of each tap's token. */
static void mix(const States *s, const float *const before[TAPS], long first, long count, float *to) {
  for (long i = 0; i < count; i += LANES) {
    vec sum = all(0);
    for (int tap = 0; tap < TAPS; tap++) {
      if (!before[tap]) continue; /* before the first token */
      const float *weights = s->weights + tap * inputs_of(s) + first + i;
      sum = fma_(load_some(weights, count - i, 0), load_some(before[tap] + first + i, count - i, 0), sum);
    }
    Power e = power(-sum);
    store_some(to + i, count - i, sum * e.over / (e.over + e.number));
  }
}

static void normalize(float *x, long count, double factor) {
  const float size = (float)(factor / __builtin_sqrt(sum_of(x, count, 1) + 1e-6));
  for (long i = 0; i < count; i++) x[i] *= size;
}

/* The dot product of two vectors, from ORDER partial sums. */
static float product_of(const float *a, const float *b, long count) {
  vec sums[PARTS];
  float parts[ORDER], sum = 0;
  for (int i = 0; i < PARTS; i++) sums[i] = all(0);
  for (long k = 0; k < count; k += ORDER)
    for (int i = 0; i < PARTS; i++) {
      const long at = k + i * LANES;
      if (at < count) sums[i] = fma_(load_some(a + at, count - at, 0), load_some(b + at, count - at, 0), sums[i]);
    }
  for (int i = 0; i < PARTS; i++) store(parts + i * LANES, sums[i]);
  for (int i = 0; i < ORDER; i++) sum += parts[i];
  return sum;
}

/* A sequence, one of its key heads, and the value heads that share it. q, k, v, d, g and rate have a row for each token. */
typedef struct {
  long start, stop, base, keep; /* tokens start..stop; the log begins at `base`; the S after `keep` tokens is stored */
  long m, head, group;          /* the row of x of token `start` */
  Place from, to;
  float *q, *k, *qk;        /* (L, Dk), and their product */
  float *v, *d, *g, *rate; /* (L, group, Dv), and a number for each value head */
  float *later;            /* S after more than `keep` tokens */
} Sequence;

static void prepare(const Product *p, Sequence *t) {
  const States *s = states_of(p);
  const long Dk = s->Dk, Dv = s->Dv, C = inputs_of(s), keys = (long)s->Hk * Dk;
  const float *A = s->weights + TAPS * C, *dt = A + s->Hv;
  for (long i = 0, row = t->start; row < t->stop; i++, row++) {
    const float *x = p->x + (t->m + i) * p->ldx, *before[TAPS];
    for (int tap = 0; tap < TAPS; tap++) {
      const long at = row - (TAPS - 1) + tap;
      before[tap] = at < 0 ? NULL : at < t->start ? inputs_at(s, &t->from, at) : x + (at - row) * p->ldx;
    }
    float *q = t->q + i * Dk, *k = t->k + i * Dk;
    mix(s, before, t->head * Dk, Dk, q);
    mix(s, before, keys + t->head * Dk, Dk, k);
    mix(s, before, 2 * keys + t->head * t->group * Dv, t->group * Dv, t->v + i * t->group * Dv);
    normalize(q, Dk, 1 / __builtin_sqrt((double)Dk));
    normalize(k, Dk, 1);
    t->qk[i] = product_of(q, k, Dk);
    for (long j = 0; j < t->group; j++) {
      const long value = t->head * t->group + j;
      t->g[i * t->group + j] = gate_of(x[C + value], dt[value], A[value]);
      t->rate[i * t->group + j] = rate_of(x[C + s->Hv + value]);
    }
  }
}

typedef struct { /* the update of a token: S <- g S + k d^T */
  const float *k, *d;
  float g;
} Change;

/* Copy some vectors of each row of S from `in` to `out`; apply the update if `changes`, multiply by k and q if `asks`. */
INLINE void read_columns(const float *in, float *out, long Dk, long Dv, Change c, const float *k, const float *q, vec *u,
                         vec *w, const int vectors, const int changes, const int asks) {
  vec ds[COLS], sums[COLS], others[COLS];
  const vec g = all(c.g);
  for (int v = 0; v < vectors; v++) {
    sums[v] = others[v] = all(0);
    if (changes) ds[v] = load(c.d + v * LANES);
  }
  for (long i = 0; i < Dk; i++, in += Dv, out += Dv)
    for (int v = 0; v < vectors; v++) {
      vec s = load(in + v * LANES);
      if (changes) s = fma_(all(c.k[i]), ds[v], times(g, s));
      store(out + v * LANES, s);
      if (!asks) continue;
      sums[v] = fma_(all(k[i]), s, sums[v]);
      others[v] = fma_(all(q[i]), s, others[v]);
    }
  for (int v = 0; asks && v < vectors; v++) u[v] = sums[v], w[v] = others[v];
}

/* Run the log and all tokens of the sequence on some columns of the S of one value head. Columns are independent, so these
   stay in the L1 cache. */
INLINE void read_tokens(const Product *p, const Sequence *t, long which, long column, const int vectors) {
  const States *s = states_of(p);
  const long Dk = s->Dk, Dv = s->Dv, value = t->head * t->group + which;
  const float *in = t->from.S + value * Dk * Dv + column;
  float *own = t->to.S + value * Dk * Dv + column;
  Change waits = {NULL, NULL, 0};
  vec u[COLS], w[COLS];
  for (long row = t->base; row < t->stop; row++) {
    float *out = row <= t->keep ? own : t->later + column;
    if (row < t->start) { /* in the log */
      const long at = row % t->from.log;
      if (waits.k) {
        read_columns(in, out, Dk, Dv, waits, NULL, NULL, u, w, vectors, 1, 0);
        in = out;
      }
      waits = (Change){t->from.keys + (at * s->Hk + t->head) * Dk, t->from.differences + (at * s->Hv + value) * Dv + column,
                       t->from.gates[at * s->Hv + value]};
      continue;
    }
    const long i = row - t->start, at = i * t->group + which;
    const float *k = t->k + i * Dk, *v = t->v + at * Dv + column;
    float *d = t->d + at * Dv + column, *y = p->y + (t->m + i) * p->ldy + value * Dv + column;
    if (waits.k) read_columns(in, out, Dk, Dv, waits, k, t->q + i * Dk, u, w, vectors, 1, 1);
    else read_columns(in, out, Dk, Dv, waits, k, t->q + i * Dk, u, w, vectors, 0, 1);
    in = out;
    for (int j = 0; j < vectors; j++) {
      vec change = times(all(t->rate[at]), fma_(all(-t->g[at]), u[j], load(v + j * LANES)));
      store(d + j * LANES, change);
      store(y + j * LANES, fma_(all(t->qk[i]), change, times(all(t->g[at]), w[j])));
    }
    waits = (Change){k, d, t->g[at]};
  }
}
static NOINLINE void read_wide(const Product *p, const Sequence *t, long which, long column) {
  read_tokens(p, t, which, column, COLS);
}
static NOINLINE void read_narrow(const Product *p, const Sequence *t, long which, long column) {
  read_tokens(p, t, which, column, 1);
}

/* Write the log from `keep` on, and the inputs that the next tokens need. */
static void write_log(const Product *p, const Sequence *t) {
  const States *s = states_of(p);
  const long Dk = s->Dk, Dv = s->Dv, group = t->group, keys = (long)s->Hk * Dk;
  for (long row = t->keep; row < t->stop; row++) {
    const long i = row - t->start, at = row % t->to.log, values = at * s->Hv + t->head * group;
    memcpy(t->to.keys + (at * s->Hk + t->head) * Dk, t->k + i * Dk, Dk * sizeof(float));
    memcpy(t->to.differences + values * Dv, t->d + i * group * Dv, group * Dv * sizeof(float));
    memcpy(t->to.gates + values, t->g + i * group, group * sizeof(float));
  }
  const long firsts[] = {t->head * Dk, keys + t->head * Dk, 2 * keys + t->head * group * Dv}, counts[] = {Dk, Dk, group * Dv};
  for (long row = t->keep < TAPS - 1 ? 0 : t->keep - (TAPS - 1); row < t->stop; row++) {
    const float *from = row < t->start ? inputs_at(s, &t->from, row) : p->x + (t->m + row - t->start) * p->ldx;
    float *to = inputs_at(s, &t->to, row);
    for (int part = 0; from != to && part < 3; part++)
      memcpy(to + firsts[part], from + firsts[part], counts[part] * sizeof(float));
  }
}

static NOINLINE void change_state(const Product *p, long unit) {
  const States *s = states_of(p);
  const long Dk = s->Dk, Dv = s->Dv, group = s->Hv / s->Hk, tile = unit % p->tile_count;
  const long m = p->tiles[tile], L = p->tiles[tile + 1] - m, from = move_of(p, m, FROM), to = move_of(p, m, TO);
  Sequence t = {.m = m, .head = unit / p->tile_count, .group = group, .start = move_of(p, m, ROW)};
  t.base = move_of(p, m, BASE), t.keep = move_of(p, m, KEEP), t.stop = t.start + L;
  const int is_inside = 0 <= to && to < s->places && -1 <= from && from < s->places && (from >= 0 || t.start == 0);
  if (is_inside) t.to = place_of(s, to), t.from = from < 0 ? t.to : place_of(s, from);
  if (!is_inside || t.base > t.start || t.start - t.base > t.from.log || t.keep < t.start || t.keep >= t.stop ||
      t.stop - t.keep > t.to.log) {
    fprintf(stderr, "nanobatch: tokens %ld..%ld, from %ld in place %ld to %ld in place %ld\n", t.start, t.stop, t.base, from,
            t.keep, to);
    abort();
  }
  if (from < 0) memset(t.to.S + t.head * group * Dk * Dv, 0, group * Dk * Dv * sizeof(float));

  t.q = scratch(L * (2 * Dk + 2 * group * Dv + 2 * group + 1) + Dk * Dv);
  t.k = t.q + L * Dk, t.v = t.k + L * Dk, t.d = t.v + L * group * Dv, t.later = t.d + L * group * Dv;
  t.g = t.later + Dk * Dv, t.rate = t.g + L * group, t.qk = t.rate + L * group;
  prepare(p, &t);
  for (long which = 0; which < group; which++)
    for (long column = 0; column < Dv;) {
      const int is_wide = Dv - column >= COLS * LANES;
      (is_wide ? read_wide : read_narrow)(p, &t, which, column);
      column += is_wide ? COLS * LANES : LANES;
    }
  write_log(p, &t);
}

/* Write the label of a layer's states at the end of their memory. Returns the count of numbers before the label. */
long rows_states(float *memory, const int *sizes, const float *weights) {
  States s = {.form = DELTA, .slots = sizes[0], .places = sizes[1], .log = sizes[2], .weights = weights};
  s.Hk = sizes[3], s.Hv = sizes[4], s.Dk = sizes[5], s.Dv = sizes[6];
  memcpy(s.key, key, sizeof key);
  if (memory) memcpy(memory + states_size(&s), &s, sizeof s);
  return states_size(&s);
}
