/* The one body. cpu.c includes it once for each instruction set, after that set's simd_*.h, which names
 * the vector V of EF_W floats and the norm accumulator N of EF_LANES doubles.
 *
 * Every element type is the same loop with another load. Products and sums are rounded one by one
 * (-ffp-contract=off), updates are taken in ascending order, and a block's norm is summed in EF_LANES
 * interleaved lanes, so all instruction sets give the same bits. */

EF_PRIM EF(V) EF(load)(const int dtype, const char *p, int64_t i)
{
    switch (dtype) {
    case EF_F16: return EF(vload_f16)(p + 2 * i);
    case EF_BF16: return EF(vload_bf16)(p + 2 * i);
    case EF_I8: return EF(vload_i8)(p + i);
    default: return EF(vload)(p + 4 * i);
    }
}

/* The last n < EF_W elements, followed by zeros (which add nothing to a norm). */
EF_PRIM EF(V) EF(load_part)(const int dtype, const char *p, int64_t i, int64_t n)
{
    char full[4 * EF_W] = {0};
    memcpy(full, p + i * ef_size(dtype), (size_t)(n * ef_size(dtype)));
    return EF(load)(dtype, full, 0);
}

/* The squares of the last n < EF_W int8 elements. */
EF_PRIM EF(I) EF(iadd_part)(EF(I) sum, const char *p, int64_t n)
{
    char full[EF_W] = {0};
    memcpy(full, p, (size_t)n);
    return EF(iadd_at)(sum, full);
}

/* What one scale block of int8 adds to the squared norm: the square of a float is exact in a double, and so
 * is the sum of the integers' squares. */
EF_PRIM double EF(scaled)(float scale, EF(I) squares)
{
    return (double)scale * (double)scale * (double)EF(isum)(squares);
}

EF_PRIM double EF(fold)(EF(N) n)
{
    double l[EF_LANES];
    EF(nlanes)(l, n);
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/* dst = src + sum_j weight_j * u_j over one tile, for `count` <= EF_GROUP updates of one type. What belongs
 * to one update has a name of its own (n0, n1, …): compilers keep names in registers, but not arrays. */
#define EF_EACH(x)                                                                                           \
    x(0) if (count > 1) { x(1) } if (count > 2) { x(2) } if (count > 3) { x(3) }                             \
    if (count > 4) { x(4) } if (count > 5) { x(5) }
#define EF_NAME(j) EF(V) w##j, s##j; EF(N) n##j; EF(I) q##j; double t##j = 0.0; const char *p##j;
#define EF_START(j)                                                                                          \
    w##j = EF(vset)(u[j].weight), n##j = EF(nzero)(), p##j = (const char *)u[j].data + at * ef_size(dtype);
#define EF_SCALE(j) s##j = EF(vset)(u[j].scales[(at + run) / EF_SCALE_BLOCK]), q##j = EF(izero)();
#define EF_SCALED(j) t##j += EF(scaled)(u[j].scales[(at + run) / EF_SCALE_BLOCK], q##j);
#define EF_TAKE(j, loaded, whole)                                                                            \
    {                                                                                                        \
        EF(V) x = loaded;                                                                                    \
        if (dtype == EF_I8) q##j = whole ? EF(iadd_at)(q##j, p##j + i) : EF(iadd_part)(q##j, p##j + i, end - i);\
        else if (dtype == EF_F32 && whole) n##j = EF(nadd_at)(n##j, p##j + 4 * i);                           \
        else n##j = EF(nadd)(n##j, x);                                                                       \
        if (dtype == EF_I8) x = EF(vmul)(s##j, x);                                                           \
        sum = EF(vadd)(sum, EF(vmul)(w##j, x));                                                              \
    }
#define EF_FULL(j)                                                                                           \
    EF_PREFETCH(p##j + i * ef_size(dtype) + EF_AHEAD);                                                       \
    EF_TAKE(j, EF(load)(dtype, p##j, i), 1)
/* Two vectors of one update, for the narrow types: half as many prefetches, and integers squared by pairs. */
#define EF_PAIR(j)                                                                                           \
    {                                                                                                        \
        EF_PREFETCH(p##j + i * ef_size(dtype) + EF_AHEAD);                                                   \
        EF(V) x = EF(load)(dtype, p##j, i), y = EF(load)(dtype, p##j, i + EF_W);                             \
        if (dtype == EF_I8) q##j = EF(iadd2_at)(q##j, p##j + i);                                             \
        else n##j = EF(nadd_wide)(EF(nadd_wide)(n##j, x), y);                                                \
        if (dtype == EF_I8) x = EF(vmul)(s##j, x), y = EF(vmul)(s##j, y);                                    \
        sum = EF(vadd)(sum, EF(vmul)(w##j, x));                                                              \
        next = EF(vadd)(next, EF(vmul)(w##j, y));                                                            \
    }
#define EF_PART(j) EF_TAKE(j, EF(load_part)(dtype, p##j, i, end - i), 0)
#define EF_NORM(j) norms[j] = dtype == EF_I8 ? t##j : EF(fold)(n##j);

EF_PRIM void EF(group)(const int count, const int dtype, const int stream, float *dst, const float *src,
                       const ef_update *u, int64_t at, int64_t n, double *norms)
{
    const int64_t step = dtype == EF_I8 ? EF_SCALE_BLOCK : EF_TILE;
    EF_NAME(0) EF_NAME(1) EF_NAME(2) EF_NAME(3) EF_NAME(4) EF_NAME(5)
    EF_EACH(EF_START)
    for (int64_t run = 0; run < n; run += step) {
        const int64_t end = run + step < n ? run + step : n;
        int64_t i = run;
        if (dtype == EF_I8) { EF_EACH(EF_SCALE) }
        for (; dtype != EF_F32 && i + 2 * EF_W <= end; i += 2 * EF_W) {
            EF(V) sum = EF(vload)(src + i), next = EF(vload)(src + i + EF_W);
            EF_EACH(EF_PAIR)
            if (stream) EF(vstream)(dst + i, sum), EF(vstream)(dst + i + EF_W, next);
            else EF(vstore)(dst + i, sum), EF(vstore)(dst + i + EF_W, next);
        }
        for (; i + EF_W <= end; i += EF_W) {
            EF(V) sum = EF(vload)(src + i);
            EF_EACH(EF_FULL)
            if (stream) EF(vstream)(dst + i, sum);
            else EF(vstore)(dst + i, sum);
        }
        if (i < end) {
            float part[EF_W] = {0};
            memcpy(part, src + i, (size_t)(end - i) * 4);
            EF(V) sum = EF(vload)(part);
            EF_EACH(EF_PART)
            EF(vstore)(part, sum);
            memcpy(dst + i, part, (size_t)(end - i) * 4);
        }
        if (dtype == EF_I8) { EF_EACH(EF_SCALED) }
    }
    EF_EACH(EF_NORM)
}
#undef EF_EACH
#undef EF_NAME
#undef EF_START
#undef EF_SCALE
#undef EF_SCALED
#undef EF_TAKE
#undef EF_FULL
#undef EF_PAIR
#undef EF_PART
#undef EF_NORM

#define EF_COUNT(count, dtype, stream)                                                                       \
    case count: EF(group)(count, dtype, stream, dst, src, u, at, n, norms); return;
#define EF_COUNTS(dtype, stream)                                                                             \
    switch (count) {                                                                                         \
        EF_COUNT(1, dtype, stream) EF_COUNT(2, dtype, stream) EF_COUNT(3, dtype, stream)                     \
        EF_COUNT(4, dtype, stream) EF_COUNT(5, dtype, stream) EF_COUNT(6, dtype, stream)                     \
    }
#define EF_DTYPE(name)                                                                                       \
    EF_TARGET static void EF(group_##name)(int count, int stream, float *dst, const float *src,              \
                                           const ef_update *u, int64_t at, int64_t n, double *norms)         \
    {                                                                                                        \
        if (stream) EF_COUNTS(name, 1)                                                                       \
        else EF_COUNTS(name, 0)                                                                              \
    }
EF_DTYPE(EF_F32)
EF_DTYPE(EF_F16)
EF_DTYPE(EF_BF16)
EF_DTYPE(EF_I8)
#undef EF_DTYPE
#undef EF_COUNTS
#undef EF_COUNT

/* Even and odd 32-bit words of every 64-bit lane; `later` sums the running sums, so that the position
 * weights need no multiplication: sum_j j*w_j = rounds*sum - later. */
EF_TARGET static void EF(words)(const unsigned char *p, int64_t n, uint64_t s[2])
{
    enum { LANES = sizeof(EF(U)) / 8, WORDS = 2 * LANES };
    EF(U) even = {0}, odd = {0}, later_even = {0}, later_odd = {0};
    const int64_t rounds = n / WORDS;
    for (int64_t r = 0; r < rounds; r++) {
        EF(U) x;
        memcpy(&x, p + r * (int64_t)sizeof x, sizeof x);
        even += x & 0xffffffffu;
        odd += x >> 32;
        later_even += even;
        later_odd += odd;
    }
    uint64_t s1 = 0, s2 = 0;
    for (int l = 0; l < LANES; l++) {
        s1 += even[l] + odd[l];
        s2 += WORDS * ((uint64_t)rounds * (even[l] + odd[l]) - (later_even[l] + later_odd[l]));
        s2 += (uint64_t)(2 * l + 1) * even[l] + (uint64_t)(2 * l + 2) * odd[l];
    }
    for (int64_t i = rounds * WORDS; i < n; i++) {
        uint32_t w;
        memcpy(&w, p + 4 * i, 4);
        s1 += w;
        s2 += (uint64_t)(i + 1) * w;
    }
    s[0] += s1;
    s[1] += s2;
}

#include "body_step.h"
#include "body_quantize.h"

EF_TARGET static void EF(tile)(float *out, const float *base, const ef_update *u, int64_t count, int64_t at,
                               int64_t n, double *norms, uint64_t *sums, const ef_step *step, int stream)
{
    typedef void (*group)(int, int, float *, const float *, const ef_update *, int64_t, int64_t, double *);
    static const group of_dtype[] = {EF(group_EF_F32), EF(group_EF_F16), EF(group_EF_BF16), EF(group_EF_I8)};
    float scratch[EF_TILE] __attribute__((aligned(64)));
    const float *src = base ? base + at : NULL;
    if (!src) {
        memset(scratch, 0, (size_t)n * 4);
        src = scratch;
    }
    if (!count && !step) memmove(out + at, src, (size_t)n * 4);
    for (int64_t j = 0; j < count;) {
        int64_t same = j, size;
        while (same < count && u[same].dtype == u[j].dtype) same++;
        /* Equal groups: 8 updates are read as 4 and 4, not as 6 and 2. */
        size = (same - j + EF_GROUP - 1) / EF_GROUP;
        size = (same - j + size - 1) / size;
        const int last = j + size == count && !step;
        float *dst = last ? out + at : scratch;
        of_dtype[u[j].dtype]((int)size, last && stream, dst, src, u + j, at, n, norms + j);
        /* While this group's part is still in the cache. */
        for (int64_t g = j; sums && g < j + size; g++)
            EF(words)((const unsigned char *)u[g].data + at * ef_size(u[g].dtype), n * ef_size(u[g].dtype) / 4,
                      sums + 2 * g);
        src = dst;
        j += size;
    }
    if (step) EF(step)(step, stream, src, at, n);
}

EF_TARGET static double EF(block_norm)(const ef_update *u, int64_t at, int64_t n)
{
    const int dtype = u->dtype;
    const char *p = (const char *)u->data + at * ef_size(dtype);
    EF(N) norm = EF(nzero)();
#define EF_NORM(name)                                                                                        \
    for (int64_t i = 0; i < n; i += EF_W)                                                                    \
        norm = EF(nadd)(norm, n - i < EF_W ? EF(load_part)(name, p, i, n - i) : EF(load)(name, p, i));
    switch (dtype) {
    case EF_F16: EF_NORM(EF_F16) break;
    case EF_BF16: EF_NORM(EF_BF16) break;
    case EF_F32: EF_NORM(EF_F32) break;
    default: {
        double total = 0.0;
        for (int64_t run = 0; run < n; run += EF_SCALE_BLOCK) {
            const int64_t end = run + EF_SCALE_BLOCK < n ? run + EF_SCALE_BLOCK : n;
            EF(I) squares = EF(izero)();
            int64_t i = run;
            for (; i + EF_W <= end; i += EF_W) squares = EF(iadd_at)(squares, p + i);
            if (i < end) squares = EF(iadd_part)(squares, p + i, end - i);
            total += EF(scaled)(u->scales[(at + run) / EF_SCALE_BLOCK], squares);
        }
        return total;
    }
    }
#undef EF_NORM
    return EF(fold)(norm);
}

/* Nothing but reading: the bandwidth limit that the others are measured against. Four streams at once,
 * because one keeps too few loads in flight. */
EF_TARGET static uint64_t EF(read)(const unsigned char *p, int64_t bytes)
{
    enum { STREAMS = 4, LINE = 64 };
    EF(U) sum[STREAMS] = {{0}};
    uint64_t all = 0;
    const int64_t stream = bytes / STREAMS / LINE * LINE;
    for (int64_t i = 0; i < stream; i += LINE)
        for (int j = 0; j < STREAMS; j++)
            for (int l = 0; l < LINE; l += (int)sizeof(EF(U))) {
                EF(U) x;
                memcpy(&x, p + stream * j + i + l, sizeof x);
                sum[j] ^= x;
            }
    for (int j = 0; j < STREAMS; j++)
        for (size_t l = 0; l < sizeof(EF(U)) / 8; l++) all ^= sum[j][l];
    for (int64_t i = STREAMS * stream; i < bytes; i++) all ^= p[i];
    return all;
}

static const ef_isa EF(isa) = {EF_ISA_NAME, EF(tile), EF(quantize), EF(block_norm), EF(words), EF(read)};

#undef EF
#undef EF_ISA_NAME
#undef EF_TARGET
#undef EF_W
