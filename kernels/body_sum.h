/* The part of the body that sums: dst = src + sum_j weight_j * u_j over a span, for a few updates of one type. */

/* What belongs to one update has a name of its own (n0, n1, ...): compilers keep names in registers, but not
 * arrays. A step is 64 bytes or more of each update: as many vectors of it as one prefetch is worth. */
#define EF_EACH(x)                                                                                           \
    x(0) if (count > 1) { x(1) } if (count > 2) { x(2) } if (count > 3) { x(3) }                             \
    if (count > 4) { x(4) } if (count > 5) { x(5) }
#define EF_NAME(j) EF(V) w##j, s##j; EF(N) n##j; EF(I) q##j; double l##j[EF_LANES]; const char *p##j = NULL, *t##j = NULL;
#define EF_START(j)                                                                                          \
    w##j = EF(vset)(u[j].weight), n##j = EF(nzero)(), p##j = (const char *)u[j].data + at * size;            \
    if (dtype == EF_I8) memset(l##j, 0, sizeof l##j);
#define EF_SCALE(j) s##j = EF(vset)(u[j].scales[(at + run) / EF_SCALE_BLOCK]), q##j = EF(izero)();
#define EF_SCALED(j)                                                                                         \
    l##j[run % EF_TILE / EF_SCALE_BLOCK] = EF(scaled)(u[j].scales[(at + run) / EF_SCALE_BLOCK], q##j);
#define EF_TAKE(j, v)                                                                                        \
    if (vectors > v) {                                                                                       \
        EF(V) x = EF(load)(dtype, p, v * EF_W);                                                              \
        if (dtype == EF_F32) n##j = EF(nadd_at)(n##j, p + v * EF_W * 4);                                     \
        else if (dtype == EF_I8) x = EF(vmul)(s##j, x);                                                      \
        else n##j = EF(nadd_half)(n##j, x);                                                              \
        sum##v = EF(vadd)(sum##v, EF(vmul)(w##j, x));                                                        \
    }
#define EF_STEP(j)                                                                                           \
    {                                                                                                        \
        const char *p = p##j + i * size;                                                                     \
        EF_PREFETCH(p + EF_AHEAD, dtype);                                                                    \
        if (dtype == EF_I8) q##j = EF(iadd)(q##j, p);                                                        \
        EF_TAKE(j, 0) EF_TAKE(j, 1) EF_TAKE(j, 2) EF_TAKE(j, 3)                                              \
    }
/* The last elements, fewer than a step, are followed by zeros, which add nothing to a norm. */
#define EF_TAIL(j)                                                                                           \
    memset(tails[j], 0, sizeof tails[j]);                                                                    \
    memcpy(tails[j], p##j + i * size, (size_t)((end - i) * size));                                           \
    t##j = p##j, p##j = tails[j] - i * size;
#define EF_BACK(j) p##j = t##j;
#define EF_NORM(j)                                                                                           \
    norms[j + run / EF_TILE * stride] = dtype == EF_I8    ? EF(fold)(l##j)                                   \
                                        : dtype == EF_F32 ? EF(folded)(n##j) : EF(folded_half)(n##j);        \
    n##j = EF(nzero)();                                                                                      \
    if (dtype == EF_I8) memset(l##j, 0, sizeof l##j);

/* Negative where it has to be computed in another way. */
EF_PRIM double EF(folded_half)(EF(N) n)
{
    double l[EF_LANES];
    return EF(nlanes_half)(l, n) ? EF(fold)(l) : -1.0;
}

/* fresh: src is not what the last group left in the cache. */
EF_PRIM void EF(group)(const int count, const int dtype, const int stream, int fresh, float *dst,
                       const float *src, const ef_update *u, int64_t at, int64_t n, double *norms,
                       int64_t stride)
{
    const int vectors = dtype == EF_F32 ? EF_F32_VECTORS : dtype == EF_I8 ? 4 : EF_HALF_VECTORS;
    const int64_t size = ef_size(dtype), width = vectors * EF_W, part = dtype == EF_I8 ? EF_SCALE_BLOCK : EF_TILE;
    char tails[EF_GROUP][16 * EF_W];
    float few[4 * EF_W] __attribute__((aligned(64)));
    EF_NAME(0) EF_NAME(1) EF_NAME(2) EF_NAME(3) EF_NAME(4) EF_NAME(5)
    EF_EACH(EF_START)
    for (int64_t run = 0; run < n; run += part) {
        const int64_t end = run + part < n ? run + part : n, whole = end - (end - run) % width;
        int64_t i = run;
        if (dtype == EF_I8) { EF_EACH(EF_SCALE) }
        for (;;) {
            const float *from = src;
            float *to = dst;
            int64_t stop = whole;
            if (i == whole) {
                if (i == end) break;
                EF_EACH(EF_TAIL)
                memcpy(few, src + i, (size_t)(end - i) * 4);
                from = to = few - i;
                stop = i + width;
            }
            for (; i < stop; i += width) {
                /* The base, too: beside 10 updates of int8 it is over a quarter of the bytes that are read. */
                for (int64_t l = i; fresh && l < i + width; l += 16) EF_PREFETCH(from + l + EF_AHEAD / size, EF_F32);
                EF(V) sum0 = EF(vload)(from + i), sum1, sum2, sum3;
                if (vectors > 1) sum1 = EF(vload)(from + i + EF_W);
                if (vectors > 2) sum2 = EF(vload)(from + i + 2 * EF_W), sum3 = EF(vload)(from + i + 3 * EF_W);
                EF_EACH(EF_STEP)
#define EF_PUT(put)                                                                                          \
    put(to + i, sum0);                                                                                       \
    if (vectors > 1) put(to + i + EF_W, sum1);                                                               \
    if (vectors > 2) put(to + i + 2 * EF_W, sum2), put(to + i + 3 * EF_W, sum3);
                if (stream) { EF_PUT(EF(vstream)) } else { EF_PUT(EF(vstore)) }
            }
            if (i <= end) continue;
            i -= width;
            memcpy(dst + i, few, (size_t)(end - i) * 4);
            EF_EACH(EF_BACK)
            break;
        }
        if (dtype == EF_I8) { EF_EACH(EF_SCALED) }
        if (end == n || end % EF_TILE == 0) { EF_EACH(EF_NORM) }
    }
}
#undef EF_EACH
#undef EF_NAME
#undef EF_START
#undef EF_SCALE
#undef EF_SCALED
#undef EF_TAKE
#undef EF_STEP
#undef EF_TAIL
#undef EF_BACK
#undef EF_PUT
#undef EF_NORM

#define EF_COUNT(count, dtype, stream)                                                                       \
    case count: EF(group)(count, dtype, stream, fresh, dst, src, u, at, n, norms, stride); return;
#define EF_COUNTS(dtype, stream)                                                                             \
    switch (count) {                                                                                         \
        EF_COUNT(1, dtype, stream) EF_COUNT(2, dtype, stream) EF_COUNT(3, dtype, stream)                     \
        EF_COUNT(4, dtype, stream) EF_COUNT(5, dtype, stream) EF_COUNT(6, dtype, stream)                     \
    }
#define EF_DTYPE(name)                                                                                       \
    EF_TARGET static void EF(group_##name)(int count, int stream, int fresh, float *dst, const float *src,   \
                                           const ef_update *u, int64_t at, int64_t n, double *norms,         \
                                           int64_t stride)                                                   \
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

/* Norms of halves that the fast way was not sure of, or all. */
EF_TARGET static void EF(norms_again)(const ef_update *u, int64_t size, int64_t at, int64_t n, double *norms,
                                      int64_t stride, int all)
{
    for (int64_t t = 0; t * EF_TILE < n; t++)
        for (int64_t j = 0; j < size; j++) {
            const int64_t start = t * EF_TILE, left = n - start;
            if (all || norms[j + t * stride] < 0.0)
                norms[j + t * stride] = EF(block_norm)(u + j, at + start, left < EF_TILE ? left : EF_TILE);
        }
}

EF_TARGET static void EF(span)(float *out, const float *base, const ef_update *u, int64_t count, int64_t at,
                               int64_t n, double *norms, uint64_t *sums, const ef_step *step, int stream)
{
    typedef void (*group)(int, int, int, float *, const float *, const ef_update *, int64_t, int64_t, double *,
                          int64_t);
    static const group of_dtype[] = {EF(group_EF_F32), EF(group_EF_F16), EF(group_EF_BF16), EF(group_EF_I8)};
    static const int most[] = EF_GROUP_SIZES;
    float scratch[EF_SPAN * EF_TILE] __attribute__((aligned(64)));
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
        size = (same - j + most[u[j].dtype] - 1) / most[u[j].dtype];
        size = (same - j + size - 1) / size;
        const int last = j + size == count && !step;
        float *dst = last ? out + at : scratch;
        EF(watch)();
        of_dtype[u[j].dtype]((int)size, last && stream, !j && base, dst, src, u + j, at, n, norms + j, count);
        if (EF(rounded)() && u[j].dtype == EF_BF16) EF(norms_again)(u + j, size, at, n, norms + j, count, 1);
        else if (u[j].dtype == EF_F16 || u[j].dtype == EF_BF16)
            EF(norms_again)(u + j, size, at, n, norms + j, count, 0);
        /* While this group's part is still in the cache. */
        for (int64_t g = j; sums && g < j + size; g++)
            EF(words)((const unsigned char *)u[g].data + at * ef_size(u[g].dtype), n * ef_size(u[g].dtype) / 4,
                      sums + 2 * g);
        src = dst;
        j += size;
    }
    if (step) EF(step)(step, stream, src, at, n);
}

