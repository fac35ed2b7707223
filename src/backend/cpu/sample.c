/* Choosing tokens: greedy, or a draw from the sorted distribution cut by top-k, top-p and min-p.
 *
 * Callers: the table in cpu.c.
 * Every filter keeps a prefix of the distribution sorted by descending logit (ties: ascending id),
 * so the vocabulary is never sorted: tokens fall into SAMPLE_BUCKETS buckets by their distance from
 * the largest logit, and only buckets in which a boundary falls are sorted, at most one per filter
 * and one for the draw. Invariants: a row is computed by one thread in one order: its token depends
 * on its logits and its sampling row only. Non-finite rule: NaN or +inf anywhere, or no finite
 * logit among the allowed ids, is a fault: id -1, log-probabilities -9999. -inf alone is a mask. */
#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_scratch.h"
#include "backend/sample_random.h"

#define SAMPLE_BUCKETS  4096u
#define SAMPLE_DISTANCE 64.0f /* exp(-64): what lies beyond shares the last bucket */
#define LOGPROB_MIN     (-9999.0f)

/* ---------------------------------------------------------------- scratch */

typedef struct candidate {
    float logit;
    int32_t id;
} candidate;

typedef struct sampler {
    const nbi_cpu_kernels *k;
    const float *logits; /* [n], bans applied */
    uint32_t n;
    float max, inv_t;
    float *p;              /* [n] exp((logit - max) / T); 1 for the largest */
    uint16_t *bucket;      /* [n] */
    candidate *list, *aux; /* [n] one sorted bucket; room for the merge */
    double *mass;          /* [SAMPLE_BUCKETS] sum of p */
    float *least;          /* [SAMPLE_BUCKETS] smallest p */
    uint32_t *count;       /* [SAMPLE_BUCKETS] */
    uint32_t listed;       /* bucket in `list`, or SAMPLE_BUCKETS */
} sampler;

static size_t sampler_layout(sampler *s, char *base, uint32_t vocab)
{
    nbi_plan p = {0};
    const size_t probs = nbi_plan_add(&p, vocab * sizeof(float));
    const size_t bucket = nbi_plan_add(&p, vocab * sizeof(uint16_t));
    const size_t list = nbi_plan_add(&p, vocab * sizeof(candidate));
    const size_t aux = nbi_plan_add(&p, vocab * sizeof(candidate));
    const size_t mass = nbi_plan_add(&p, SAMPLE_BUCKETS * sizeof(double));
    const size_t least = nbi_plan_add(&p, SAMPLE_BUCKETS * sizeof(float));
    const size_t count = nbi_plan_add(&p, SAMPLE_BUCKETS * sizeof(uint32_t));
    if (s) {
        s->p = (float *)(void *)(base + probs);
        s->bucket = (uint16_t *)(void *)(base + bucket);
        s->list = (candidate *)(void *)(base + list);
        s->aux = (candidate *)(void *)(base + aux);
        s->mass = (double *)(void *)(base + mass);
        s->least = (float *)(void *)(base + least);
        s->count = (uint32_t *)(void *)(base + count);
    }
    return p.bytes;
}

size_t nbi_cpu_sample_thread(uint32_t vocab)
{
    return sampler_layout(NULL, NULL, vocab);
}

/* ---------------------------------------------------------------- buckets */

static void fill_buckets(sampler *s)
{
    float min = s->max;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->logits[i] < min && s->logits[i] > -INFINITY) min = s->logits[i];
    float range = (s->max - min) * s->inv_t;
    if (!(range < SAMPLE_DISTANCE)) range = SAMPLE_DISTANCE;
    const float scale = range > 0 ? (float)(SAMPLE_BUCKETS - 1) / range : 0.0f;

    s->k->exp_to(s->p, s->logits, s->n, s->inv_t, s->max);
    memset(s->mass, 0, SAMPLE_BUCKETS * sizeof *s->mass);
    memset(s->count, 0, SAMPLE_BUCKETS * sizeof *s->count);
    s->listed = SAMPLE_BUCKETS;
    for (uint32_t i = 0; i < s->n; i++) {
        const float d = (s->max - s->logits[i]) * s->inv_t * scale;
        const uint32_t b = d < (float)(SAMPLE_BUCKETS - 1) ? (uint32_t)d : SAMPLE_BUCKETS - 1;
        s->bucket[i] = (uint16_t)b;
        s->mass[b] += (double)s->p[i];
        if (s->count[b]++ == 0 || s->p[i] < s->least[b]) s->least[b] = s->p[i];
    }
}

/* Stable merge sort by descending logit: equal logits keep their ascending ids. */
static void sort_candidates(candidate *list, candidate *aux, uint32_t n)
{
    for (uint32_t width = 1; width < n; width *= 2) {
        for (uint32_t lo = 0; lo < n; lo += 2 * width) {
            const uint32_t mid = n - lo < width ? n : lo + width;
            const uint32_t hi = n - lo < 2 * width ? n : lo + 2 * width;
            uint32_t a = lo, b = mid;
            for (uint32_t i = lo; i < hi; i++)
                aux[i] = a < mid && (b >= hi || !(list[b].logit > list[a].logit)) ? list[a++]
                                                                                  : list[b++];
        }
        memcpy(list, aux, n * sizeof *list);
    }
}

static const candidate *sorted_bucket(sampler *s, uint32_t b)
{
    if (s->listed == b) return s->list;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n && n < s->count[b]; i++)
        if (s->bucket[i] == b) s->list[n++] = (candidate){s->logits[i], (int32_t)i};
    sort_candidates(s->list, s->aux, n);
    s->listed = b;
    return s->list;
}

/* ---------------------------------------------------------------- prefixes of the sorted
 * distribution */

/* The first `bucket` buckets and `in_bucket` candidates of the next; their probability mass. */
typedef struct prefix {
    uint32_t bucket, in_bucket;
    double mass;
} prefix;

static prefix whole(const sampler *s)
{
    prefix p = {.bucket = SAMPLE_BUCKETS};
    for (uint32_t b = 0; b < SAMPLE_BUCKETS; b++) p.mass += s->mass[b];
    return p;
}

/* Candidates of bucket b that belong to prefix p. */
static uint32_t members(const sampler *s, const prefix *p, uint32_t b)
{
    if (b < p->bucket) return s->count[b];
    return b == p->bucket ? p->in_bucket : 0;
}

/* Cuts p to its first k candidates. */
static prefix cut_count(sampler *s, prefix p, uint32_t k)
{
    double mass = 0;
    uint32_t seen = 0;
    for (uint32_t b = 0; b < SAMPLE_BUCKETS; b++) {
        if (seen == k) return (prefix){.bucket = b, .mass = mass};
        if (seen + s->count[b] > k) {
            const candidate *c = sorted_bucket(s, b);
            for (uint32_t i = 0; i < k - seen; i++) mass += (double)s->p[c[i].id];
            return (prefix){.bucket = b, .in_bucket = k - seen, .mass = mass};
        }
        seen += s->count[b];
        mass += s->mass[b];
    }
    return p;
}

/* Cuts p to the shortest prefix with at least `target` mass, one candidate at least. */
static prefix cut_mass(sampler *s, prefix p, double target)
{
    double mass = 0;
    for (uint32_t b = 0; b < SAMPLE_BUCKETS; b++) {
        const uint32_t n = members(s, &p, b);
        if (n == 0) continue;
        if (n == s->count[b] && mass + s->mass[b] < target) {
            mass += s->mass[b];
            continue;
        }
        const candidate *c = sorted_bucket(s, b);
        for (uint32_t i = 0; i < n; i++) {
            mass += (double)s->p[c[i].id];
            if (mass >= target) return (prefix){.bucket = b, .in_bucket = i + 1, .mass = mass};
        }
    }
    return p;
}

/* Cuts p to candidates with at least min_p of the largest probability (which is 1 here). */
static prefix cut_ratio(sampler *s, prefix p, float min_p)
{
    double mass = 0;
    for (uint32_t b = 0; b < SAMPLE_BUCKETS; b++) {
        const uint32_t n = members(s, &p, b);
        if (n == 0) continue;
        if (n == s->count[b] && s->least[b] >= min_p) {
            mass += s->mass[b];
            continue;
        }
        const candidate *c = sorted_bucket(s, b);
        uint32_t keep = 0;
        while (keep < n && s->p[c[keep].id] >= min_p) mass += (double)s->p[c[keep++].id];
        if (keep < n) return (prefix){.bucket = b, .in_bucket = keep, .mass = mass};
    }
    p.mass = mass;
    return p;
}

/* The candidate at which the running mass passes u * mass. */
static int32_t draw(sampler *s, prefix p, double u)
{
    const double target = u * p.mass;
    double mass = 0;
    int32_t last = -1;
    for (uint32_t b = 0; b < SAMPLE_BUCKETS; b++) {
        const uint32_t n = members(s, &p, b);
        if (n == 0) continue;
        if (n == s->count[b] && mass + s->mass[b] <= target) {
            mass += s->mass[b];
            continue;
        }
        const candidate *c = sorted_bucket(s, b);
        for (uint32_t i = 0; i < n; i++) {
            mass += (double)s->p[c[i].id];
            if (s->p[c[i].id] > 0) last = c[i].id;
            if (mass > target) return c[i].id;
        }
    }
    return last; /* rounding: the last that has any probability */
}

static int32_t choose_random(sampler *s, const nbi_sample_row *row)
{
    s->inv_t = 1.0f / row->temperature;
    fill_buckets(s);
    prefix p = whole(s);
    if (row->top_k > 0 && (uint32_t)row->top_k < s->n) p = cut_count(s, p, (uint32_t)row->top_k);
    if (row->top_p < 1.0f) p = cut_mass(s, p, (double)row->top_p * p.mass);
    if (row->min_p > 0.0f) p = cut_ratio(s, p, row->min_p);
    return draw(s, p, nbi_sample_uniform(row->seed, row->counter));
}

/* ---------------------------------------------------------------- log-probabilities */

static float clamp_logprob(double v)
{
    return v > (double)LOGPROB_MIN ? (float)v : LOGPROB_MIN;
}

/* Largest n_top of logits[0, n), descending, ties to the lower id, by insertion: few elements pass
 * the smallest one kept. */
static void top_list(nbi_sample_out *out, const float *logits, uint32_t n, uint32_t n_top,
                     double lse)
{
    float best[NBI_SAMPLE_TOP_MAX] = {0};
    uint32_t have = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (have == n_top && !(logits[i] > best[n_top - 1])) continue;
        uint32_t at = have < n_top ? have++ : n_top - 1;
        for (; at > 0 && logits[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            out->top_ids[at] = out->top_ids[at - 1];
        }
        best[at] = logits[i];
        out->top_ids[at] = (int32_t)i;
    }
    for (uint32_t i = 0; i < have; i++) out->top_logprobs[i] = clamp_logprob((double)best[i] - lse);
    for (uint32_t i = have; i < n_top; i++) {
        out->top_ids[i] = -1;
        out->top_logprobs[i] = LOGPROB_MIN;
    }
}

static void wanted_list(nbi_sample_out *out, const nbi_sample_row *row, const float *logits,
                        double lse)
{
    for (uint32_t i = 0; i < row->n_wanted; i++) {
        out->top_ids[i] = row->wanted[i];
        out->top_logprobs[i] = clamp_logprob((double)logits[row->wanted[i]] - lse);
    }
}

/* ---------------------------------------------------------------- one row */

static int32_t argmax(const float *x, uint32_t n, float max)
{
    for (uint32_t i = 0; i < n; i++)
        if (x[i] == max) return (int32_t)i;
    return -1;
}

/* NaN or +inf anywhere. */
static bool broken(const float *x, uint32_t n)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; i++) bad |= !(x[i] < INFINITY);
    return bad != 0;
}

static void fault(const nbi_sample_args *a, uint32_t r)
{
    nbi_sample_out *out = &a->out[r];
    out->id = -1;
    out->logprob = LOGPROB_MIN;
    for (uint32_t i = 0; i < NBI_SAMPLE_TOP_MAX; i++) {
        out->top_ids[i] = -1;
        out->top_logprobs[i] = LOGPROB_MIN;
    }
    if (a->row_fault && a->row_fault[r] == 0) a->row_fault[r] = 1 + (int32_t)NBI_WHERE_LOGITS;
}

/* What the request asks for beyond the model's own distribution. */
static void change_logits(const nbi_sample_row *row, float *logits, uint32_t n)
{
    for (uint32_t i = 0; i < row->n_adjust; i++) {
        nbi_sample_adjust *a = &row->adjust[i];
        if ((uint32_t)a->id >= n) continue;
        const float x = a->untouched = logits[a->id];
        logits[a->id] = (x > 0 ? x / a->repetition : x * a->repetition) + a->bias;
    }
    for (uint32_t i = 0; i < row->n_banned; i++)
        if (row->banned[i] >= 0 && (uint32_t)row->banned[i] < n) logits[row->banned[i]] = -INFINITY;
    for (uint32_t i = 0; row->mask && i < n; i++)
        if (!(row->mask[i / 32] >> i % 32 & 1u)) logits[i] = -INFINITY;
}

/* The model's own logit of a chosen id. */
static float untouched(const nbi_sample_row *row, const float *logits, int32_t id)
{
    for (uint32_t i = 0; i < row->n_adjust; i++)
        if (row->adjust[i].id == id) return row->adjust[i].untouched;
    return logits[id];
}

static void sample_row(const nbi_sample_args *a, uint32_t r, sampler *s)
{
    const nbi_sample_row *row = &a->rows[r];
    nbi_sample_out *out = &a->out[r];
    float *logits = a->logits + (size_t)r * a->vocab;
    s->logits = logits;
    s->n = a->n_valid < a->vocab ? a->n_valid : a->vocab;
    if (broken(logits, a->vocab)) {
        fault(a, r);
        return;
    }
    double lse = 0;
    if (row->n_logprobs >= 0) {
        const float max = s->k->max(logits, a->vocab);
        lse = (double)max + log(s->k->log_sum(logits, a->vocab, max));
        const uint32_t want = row->n_wanted ? 0 : (uint32_t)row->n_logprobs;
        wanted_list(out, row, logits, lse);
        if (want)
            top_list(out, logits, s->n, want < NBI_SAMPLE_TOP_MAX ? want : NBI_SAMPLE_TOP_MAX, lse);
    }
    if (row->forced) {
        out->id = row->forced_id;
        out->logprob =
            row->n_logprobs >= 0 ? clamp_logprob((double)logits[out->id] - lse) : LOGPROB_MIN;
        return;
    }
    change_logits(row, logits, s->n);
    s->max = s->k->max(logits, s->n);
    if (!isfinite(s->max)) {
        fault(a, r);
        return;
    }
    out->id =
        row->temperature < NBI_GREEDY_BELOW ? argmax(logits, s->n, s->max) : choose_random(s, row);
    NB_ASSERT(out->id >= 0);
    out->logprob = row->n_logprobs >= 0
                       ? clamp_logprob((double)untouched(row, logits, out->id) - lse)
                       : LOGPROB_MIN;
}

typedef struct sample_work {
    const nbi_sample_args *a;
    const nbi_cpu_kernels *k;
    char *threads;
    size_t thread_bytes;
} sample_work;

static void sample_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const sample_work *w = arg;
    sampler s = {.k = w->k};
    sampler_layout(&s, w->threads + thread * w->thread_bytes, w->a->vocab);
    for (uint32_t r = begin; r < end; r++) sample_row(w->a, r, &s);
}

void nbi_cpu_sample(nbi_backend *b, const nbi_sample_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    sample_work w = {.a = a,
                     .k = nbi_cpu_kernels_of(cpu->level),
                     .threads = cpu->attention,
                     .thread_bytes = sampler_layout(NULL, NULL, a->vocab)};
    NB_ASSERT(nbi_pool_threads(cpu->pool) * w.thread_bytes <= cpu->attention_bytes);
    nbi_pool_run(cpu->pool, sample_task, &w, a->n_rows, 1);
}
