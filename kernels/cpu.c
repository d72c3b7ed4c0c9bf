/* The CPU back end: compiles body.h for each instruction set, selects an instruction set at run time, and divides flat
 * arrays among threads. */
#include "edgefl_kernels.h"
#include "fp_state.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums and float16 loads assume a little-endian machine"
#endif

#define EF_AHEAD 1024 /* prefetch distance in bytes, which is enough to hide the latency of memory */
/* float32 is prefetched into L2, because updates at the same page offset would evict each other's lines from L1.
 * Narrower types need fewer lines and are limited by L1 latency, so they are prefetched into L1. */
#define EF_PREFETCH(p, dtype) __builtin_prefetch((p), 0, (dtype) == EF_F32 ? 2 : 3)
#define EF_PRIM EF_TARGET static inline __attribute__((always_inline))

_Static_assert(EF_GRAIN % EF_SPAN == 0, "a grain must be a whole number of spans");
_Static_assert(EF_TILE == EF_LANES * EF_SCALE_BLOCK, "a tile must have one scale block per lane of an int8 norm");

#include "simd_generic.h"
#include "body.h"
#if defined(__x86_64__)
#include "simd_avx2.h"
#include "body.h"
#include "simd_avx512.h"
#include "body.h"
#define EF_ZEN4
#include "simd_avx2.h"
#include "body.h"
#endif

static const ef_isa *usable[5]; /* fastest first; NULL after the last */
static const ef_isa *now;
static pthread_once_t detected = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* Return 1 if the CPU is an AMD Zen 4, which executes a 512-bit operation as two 256-bit operations. */
static int halves_vectors(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 0xf) + (a >> 20 & 0xff) == 0x19;
}

/* __builtin_cpu_supports("f16c") is an error before GCC 11 and in older versions of Clang. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static void detect(void)
{
    int i = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) usable[i++] = &isa_avx512;
    if (i && __builtin_cpu_supports("avx512vl")) {
        usable[i++] = &isa_zen4;
        if (halves_vectors()) usable[0] = &isa_zen4, usable[1] = &isa_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        usable[i++] = &isa_avx2;
#endif
    usable[i] = &isa_generic;
    now = usable[0];
}

const ef_isa *ef_isa_now(void)
{
    pthread_once(&detected, detect);
    return __atomic_load_n(&now, __ATOMIC_RELAXED);
}

const char *ef_isa_name(int i)
{
    pthread_once(&detected, detect);
    return i < 5 && usable[i] ? usable[i]->name : NULL;
}

int ef_isa_set(const char *name)
{
    pthread_once(&detected, detect);
    for (int i = 0; i < 5 && usable[i]; i++)
        if (!strcmp(usable[i]->name, name)) {
            __atomic_store_n(&now, usable[i], __ATOMIC_RELAXED);
            return 1;
        }
    return 0;
}

/* Combine the sums over all whole words with the remaining bytes and the length into the checksum.
 *
 * Word i has the factor 1 + A*(i+1), which is odd because A is even. So a change of any one word changes the checksum.
 * A/2 is odd, so swapping two different words less than 2^31 apart also changes it. The other operations are
 * bijections, so they lose no information. */
uint64_t ef_folded(const uint64_t s[2], const unsigned char *p, int64_t bytes)
{
    const int64_t words = bytes / 4;
    uint32_t last = 0;
    if (bytes % 4) memcpy(&last, p + 4 * words, (size_t)(bytes % 4));
    uint64_t h = s[0] + last + 0x9e3779b97f4a7c16u * (s[1] + (uint64_t)(words + 1) * last);
    h += 0xd1b54a32d192ed03u * ((uint64_t)bytes + 1);
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
    h = (h ^ h >> 27) * 0x94d049bb133111ebu;
    return h ^ h >> 31;
}

/* ---- weighted sum ---- */

typedef struct {
    const ef_isa *isa;
    float *out;
    const float *base;
    const ef_update *u;
    int64_t count, n;
    double *partial; /* tiles x count */
    uint64_t *sums;  /* tiles x count x 2, or NULL */
    const ef_step *step;
    int stream, span; /* span: tiles per pass */
} sum_job;

/* Sum n elements from `at`: one group of updates of the same type after another, while the partial sum is in the
 * cache. */
static void sum_span(const sum_job *job, int64_t at, int64_t n, double *norms, uint64_t *sums)
{
    float scratch[EF_SPAN * EF_TILE] __attribute__((aligned(64)));
    const ef_update *u = job->u;
    const float *from = job->base ? job->base + at : memset(scratch, 0, (size_t)n * 4);
    if (!job->count && !job->step) memmove(job->out + at, from, (size_t)n * 4);
    for (int64_t j = 0; j < job->count;) {
        const int dtype = u[j].dtype, most = job->isa->most[dtype];
        int64_t same = j, groups, size;
        while (same < job->count && u[same].dtype == dtype) same++;
        /* Use groups of equal size: 8 updates are read as 4 + 4, not as 6 + 2, which would be slower. */
        groups = (same - j + most - 1) / most;
        size = (same - j + groups - 1) / groups;
        const int last = j + size == job->count && !job->step;
        float *to = last ? job->out + at : scratch;
        job->isa->group[dtype]((int)size, &(ef_group){u + j, at, n, from, to, norms + j, job->count,
                                                      last && job->stream, !j && job->base});
        /* Compute checksums now, while the group's elements are still in the cache. */
        for (int64_t g = j; sums && g < j + size; g++)
            job->isa->words((const unsigned char *)u[g].data + at * ef_size(dtype), n * ef_size(dtype) / 4,
                            sums + 2 * g);
        from = to;
        j += size;
    }
    if (job->step) job->isa->step(job->step, job->stream, from, at, n);
}

static void sum_grain(void *context, int64_t grain)
{
    const sum_job *job = context;
    const fp_state fp = fp_enter();
    for (int64_t t = grain * EF_GRAIN; t < (grain + 1) * EF_GRAIN && t * EF_TILE < job->n; t += job->span) {
        const int64_t at = t * EF_TILE, most = job->span * EF_TILE, n = job->n - at < most ? job->n - at : most;
        double *norms = job->partial + t * job->count;
        uint64_t *sums = job->sums ? job->sums + t * job->count * 2 : NULL;
        sum_span(job, at, n, norms, sums);
    }
    fp_leave(fp);
#if defined(__x86_64__)
    if (job->stream) _mm_sfence();
#endif
}

int ef_weighted_sum(float *out, const float *base, const ef_update *u, int64_t count, int64_t n,
                    double *norms, uint64_t *checksums, const ef_step *step, int threads)
{
    const int64_t tiles = (n + EF_TILE - 1) / EF_TILE, grains = (tiles + EF_GRAIN - 1) / EF_GRAIN;
    double few[128];
    uint64_t few_sums[256];
    sum_job job = {ef_isa_now(), out, base, u, count, n, few, checksums ? few_sums : NULL, step, 0, 1};
    void *many = NULL;
    if (tiles * count > (int64_t)(sizeof few / sizeof *few)) {
        many = malloc((size_t)(tiles * count) * (sizeof *job.partial + 2 * sizeof *job.sums));
        if (!many) return -1;
        job.partial = many;
        if (checksums) job.sums = (uint64_t *)(job.partial + tiles * count);
    }
    if (checksums) memset(job.sums, 0, (size_t)(tiles * count) * 2 * sizeof *job.sums);
    uintptr_t written = (uintptr_t)out;
    if (step) written = (uintptr_t)step->out | (uintptr_t)step->new_a | (uintptr_t)step->new_b;
    job.stream = n * 4 >= EF_STREAM_BYTES && written % 64 == 0 && (step || out != base);
    /* Long sequential reads use the memory bandwidth better. If all updates are int8, spans stay short,
     * because then the L1 cache is the limit. */
    for (int64_t j = 0; j < count; j++)
        if (u[j].dtype != EF_I8 && n * 4 >= EF_STREAM_BYTES) job.span = EF_SPAN;
    ef_pool_run(sum_grain, &job, grains, threads);
    for (int64_t j = 0; j < count; j++) norms[j] = 0;
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t j = 0; j < count; j++) norms[j] += job.partial[t * count + j];
    for (int64_t j = 0; checksums && j < count; j++) {
        const int64_t size = ef_size(u[j].dtype), tile_words = EF_TILE / 4 * size;
        uint64_t s[2] = {0, 0};
        for (int64_t t = 0; t < tiles; t++) {
            const uint64_t *part = job.sums + 2 * (t * count + j);
            s[0] += part[0];
            s[1] += part[1] + (uint64_t)(t * tile_words) * part[0];
        }
        checksums[j] = ef_folded(s, u[j].data, n * size);
    }
    free(many);
    return 0;
}

/* ---- norm alone ---- */

typedef struct {
    const ef_isa *isa;
    const ef_update *u;
    int64_t n;
    double *partial;
} norm_job;

static void norm_grain(void *context, int64_t grain)
{
    const norm_job *job = context;
    const fp_state fp = fp_enter();
    for (int64_t t = grain * EF_GRAIN; t < (grain + 1) * EF_GRAIN && t * EF_TILE < job->n; t++) {
        const int64_t at = t * EF_TILE;
        job->partial[t] = job->isa->block_norm(job->u, at, job->n - at < EF_TILE ? job->n - at : EF_TILE);
    }
    fp_leave(fp);
}

int ef_sq_norm(const ef_update *u, int64_t n, int threads, double *norm)
{
    const int64_t tiles = (n + EF_TILE - 1) / EF_TILE;
    double few[512];
    norm_job job = {ef_isa_now(), u, n, few};
    if (tiles > (int64_t)(sizeof few / sizeof *few)) {
        job.partial = malloc((size_t)tiles * sizeof(double));
        if (!job.partial) return -1;
    }
    ef_pool_run(norm_grain, &job, (tiles + EF_GRAIN - 1) / EF_GRAIN, threads);
    *norm = 0;
    for (int64_t t = 0; t < tiles; t++) *norm += job.partial[t];
    if (job.partial != few) free(job.partial);
    return 0;
}

/* ---- trimmed means and inner products ---- */

enum { ORDER_GRAIN = EF_GRAIN * EF_TILE };
typedef struct {
    const ef_isa *isa;
    const ef_order *o;
    double *partial; /* for each grain: EF_LANES x pairs lanes, then pairs products */
    int64_t pairs;
} order_job;

static void trimmed_tile(void *context, int64_t tile)
{
    const order_job *job = context;
    const int64_t at = tile * EF_TILE, left = job->o->n - at;
    const fp_state fp = fp_enter();
    job->isa->trimmed(job->o, at, left < EF_TILE ? left : EF_TILE);
    fp_leave(fp);
}

void ef_trimmed_mean(const ef_order *o, int threads)
{
    order_job job = {ef_isa_now(), o, NULL, 0};
    ef_pool_run(trimmed_tile, &job, (o->n + EF_TILE - 1) / EF_TILE, threads);
}

static void products_grain(void *context, int64_t grain)
{
    const order_job *job = context;
    const int64_t at = grain * ORDER_GRAIN, left = job->o->n - at;
    double *lanes = job->partial + grain * job->pairs * (EF_LANES + 1);
    const fp_state fp = fp_enter();
    job->isa->products(job->o, at, left < ORDER_GRAIN ? left : ORDER_GRAIN, lanes, lanes + job->pairs * EF_LANES);
    fp_leave(fp);
}

/* The products of the grains are added in ascending order, so that the result does not depend on the number of threads.
 * Only a window of grains is computed at a time, because the lanes of all grains of a large model would not fit into
 * memory. */
int ef_products(const ef_order *o, double *out, int threads)
{
    enum { WINDOW = 16 };
    const int64_t pairs = o->count * (o->count + 1) / 2, grains = (o->n + ORDER_GRAIN - 1) / ORDER_GRAIN;
    double *partial = malloc((size_t)(pairs * (EF_LANES + 1) * WINDOW) * sizeof *partial);
    if (!partial) return -1;
    memset(out, 0, (size_t)(o->count * o->count) * sizeof *out);
    for (int64_t first = 0; first < grains; first += WINDOW) {
        ef_order part = *o;
        ef_update shifted[EF_MOST_ORDERED];
        const int64_t at = first * ORDER_GRAIN, some = grains - first < WINDOW ? grains - first : WINDOW;
        for (int64_t k = 0; k < o->count; k++) {
            shifted[k] = o->u[k];
            shifted[k].data = (const char *)o->u[k].data + at * ef_size(o->u[k].dtype);
            if (o->u[k].scales) shifted[k].scales += at / EF_SCALE_BLOCK;
        }
        part.u = shifted, part.n = o->n - at < WINDOW * ORDER_GRAIN ? o->n - at : WINDOW * ORDER_GRAIN;
        order_job job = {ef_isa_now(), &part, partial, pairs};
        ef_pool_run(products_grain, &job, some, threads);
        for (int64_t grain = 0; grain < some; grain++) {
            const double *found = partial + (grain * (EF_LANES + 1) + EF_LANES) * pairs;
            for (int64_t j = 0; j < o->count; j++)
                for (int64_t k = j; k < o->count; k++) out[j * o->count + k] += *found++;
        }
    }
    for (int64_t j = 0; j < o->count; j++)
        for (int64_t k = 0; k < j; k++) out[j * o->count + k] = out[k * o->count + j];
    free(partial);
    return 0;
}

/* ---- quantisation ---- */

typedef struct {
    norm_job norm; /* computes the norm of the output */
    const ef_quantization *q;
} quantize_job;

static void quantize_grain(void *context, int64_t grain)
{
    const quantize_job *job = context;
    const norm_job *norm = &job->norm;
    const fp_state fp = fp_enter();
    for (int64_t t = grain * EF_GRAIN; t < (grain + 1) * EF_GRAIN && t * EF_TILE < norm->n; t++) {
        const int64_t at = t * EF_TILE, n = norm->n - at < EF_TILE ? norm->n - at : EF_TILE;
        norm->isa->quantize(job->q, at, n);
        norm->partial[t] = norm->isa->block_norm(norm->u, at, n);
    }
    fp_leave(fp);
}

int ef_quantize(const ef_quantization *q, int64_t n, int threads, double *norm)
{
    const int64_t tiles = (n + EF_TILE - 1) / EF_TILE;
    const ef_update u = {q->out, q->scales, 1.0f, q->dtype};
    double few[512];
    quantize_job job = {{ef_isa_now(), &u, n, few}, q};
    if (tiles > (int64_t)(sizeof few / sizeof *few)) {
        job.norm.partial = malloc((size_t)tiles * sizeof(double));
        if (!job.norm.partial) return -1;
    }
    ef_pool_run(quantize_grain, &job, (tiles + EF_GRAIN - 1) / EF_GRAIN, threads);
    *norm = 0;
    for (int64_t t = 0; t < tiles; t++) *norm += job.norm.partial[t];
    if (job.norm.partial != few) free(job.norm.partial);
    return 0;
}

/* ---- arithmetic modulo EF_PRIME ---- */

typedef struct {
    const ef_isa *isa;
    const ef_field_sum *sum;
    const ef_field_code *code;
    int64_t over;
    uint32_t largest;
} field_job;

static int64_t left_of(int64_t n, int64_t at) { return n - at < EF_TILE ? n - at : EF_TILE; }

static void field_sum_grain(void *context, int64_t grain)
{
    const field_job *job = context;
    const int64_t n = job->sum->n, first = grain * EF_GRAIN * EF_TILE;
    for (int64_t at = first; at < n && at < first + EF_GRAIN * EF_TILE; at += EF_TILE)
        job->isa->field_sum(job->sum, at, left_of(n, at));
}

static void field_encode_tile(void *context, int64_t tile)
{
    field_job *job = context;
    const int64_t at = tile * EF_TILE;
    const fp_state fp = fp_enter();
    const int64_t over = job->isa->field_encode(job->code, at, left_of(job->code->n, at));
    fp_leave(fp);
    if (over) __atomic_fetch_add(&job->over, over, __ATOMIC_RELAXED);
}

static void field_decode_tile(void *context, int64_t tile)
{
    field_job *job = context;
    const int64_t at = tile * EF_TILE;
    const fp_state fp = fp_enter();
    const uint32_t found = job->isa->field_decode(job->code, at, left_of(job->code->n, at));
    fp_leave(fp);
    uint32_t known = __atomic_load_n(&job->largest, __ATOMIC_RELAXED);
    while (found > known &&
           !__atomic_compare_exchange_n(&job->largest, &known, found, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

void ef_field_sum_of(const ef_field_sum *s, int threads)
{
    field_job job = {ef_isa_now(), s, NULL, 0, 0};
    const int64_t grain = EF_GRAIN * EF_TILE;
    ef_pool_run(field_sum_grain, &job, (s->n + grain - 1) / grain, threads);
}

int64_t ef_field_encode(const ef_field_code *c, int threads)
{
    field_job job = {ef_isa_now(), NULL, c, 0, 0};
    ef_pool_run(field_encode_tile, &job, (c->n + EF_TILE - 1) / EF_TILE, threads);
    return job.over;
}

uint32_t ef_field_decode(const ef_field_code *c, int threads)
{
    field_job job = {ef_isa_now(), NULL, c, 0, 0};
    ef_pool_run(field_decode_tile, &job, (c->n + EF_TILE - 1) / EF_TILE, threads);
    return job.largest;
}

/* ---- checksum ---- */

#define PIECE_WORDS (1 << 16)
typedef struct {
    const ef_isa *isa;
    const unsigned char *p;
    int64_t words;
    uint64_t s[2];
} checksum_job;

static void checksum_piece(void *context, int64_t piece)
{
    checksum_job *job = context;
    const int64_t at = piece * PIECE_WORDS, left = job->words - at;
    uint64_t s[2] = {0, 0};
    job->isa->words(job->p + 4 * at, left < PIECE_WORDS ? left : PIECE_WORDS, s);
    /* The order of these additions does not matter, because they are modulo 2^64. */
    __atomic_fetch_add(&job->s[0], s[0], __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->s[1], s[1] + (uint64_t)at * s[0], __ATOMIC_RELAXED);
}

uint64_t ef_checksum(const unsigned char *p, int64_t bytes, int threads)
{
    checksum_job job = {ef_isa_now(), p, bytes / 4, {0, 0}};
    ef_pool_run(checksum_piece, &job, (job.words + PIECE_WORDS - 1) / PIECE_WORDS, threads);
    return ef_folded(job.s, p, bytes);
}
