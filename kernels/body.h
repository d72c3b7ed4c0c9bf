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

EF_PRIM double EF(fold)(EF(N) n)
{
    double l[EF_LANES];
    EF(nlanes)(l, n);
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/* dst = src + sum_j weight_j * u_j over one tile, for `count` <= EF_GROUP updates of one type. */
EF_PRIM void EF(group)(const int count, const int dtype, const int stream, float *dst, const float *src,
                       const ef_update *u, int64_t at, int64_t n, double *norms)
{
    const int64_t step = dtype == EF_I8 ? EF_SCALE_BLOCK : EF_TILE;
    EF(V) weight[EF_GROUP], scale[EF_GROUP];
    EF(N) norm[EF_GROUP];
    const char *p[EF_GROUP];
    for (int j = 0; j < count; j++) {
        weight[j] = EF(vset)(u[j].weight);
        norm[j] = EF(nzero)();
        p[j] = (const char *)u[j].data + at * ef_size(dtype);
    }
    for (int64_t run = 0; run < n; run += step) {
        const int64_t end = run + step < n ? run + step : n;
        int64_t i = run;
        if (dtype == EF_I8)
            for (int j = 0; j < count; j++) scale[j] = EF(vset)(u[j].scales[(at + run) / EF_SCALE_BLOCK]);
        for (; i + EF_W <= end; i += EF_W) {
            EF(V) sum = EF(vload)(src + i);
            for (int j = 0; j < count; j++) {
                EF(V) x = EF(load)(dtype, p[j], i);
                EF_PREFETCH(p[j] + i * ef_size(dtype) + EF_AHEAD);
                if (dtype == EF_I8) x = EF(vmul)(scale[j], x);
                norm[j] = EF(nadd)(norm[j], x);
                sum = EF(vadd)(sum, EF(vmul)(weight[j], x));
            }
            if (stream) EF(vstream)(dst + i, sum);
            else EF(vstore)(dst + i, sum);
        }
        if (i < end) {
            float part[EF_W] = {0};
            memcpy(part, src + i, (size_t)(end - i) * 4);
            EF(V) sum = EF(vload)(part);
            for (int j = 0; j < count; j++) {
                EF(V) x = EF(load_part)(dtype, p[j], i, end - i);
                if (dtype == EF_I8) x = EF(vmul)(scale[j], x);
                norm[j] = EF(nadd)(norm[j], x);
                sum = EF(vadd)(sum, EF(vmul)(weight[j], x));
            }
            EF(vstore)(part, sum);
            memcpy(dst + i, part, (size_t)(end - i) * 4);
        }
    }
    for (int j = 0; j < count; j++) norms[j] = EF(fold)(norm[j]);
}

#define EF_COUNTS(dtype, stream)                                                                             \
    switch (count) {                                                                                         \
    case 1: EF(group)(1, dtype, stream, dst, src, u, at, n, norms); return;                                  \
    case 2: EF(group)(2, dtype, stream, dst, src, u, at, n, norms); return;                                  \
    case 3: EF(group)(3, dtype, stream, dst, src, u, at, n, norms); return;                                  \
    default: EF(group)(4, dtype, stream, dst, src, u, at, n, norms); return;                                 \
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

EF_TARGET static void EF(tile)(float *out, const float *base, const ef_update *u, int64_t count, int64_t at,
                               int64_t n, double *norms, int stream)
{
    typedef void (*group)(int, int, float *, const float *, const ef_update *, int64_t, int64_t, double *);
    static const group of_dtype[] = {EF(group_EF_F32), EF(group_EF_F16), EF(group_EF_BF16), EF(group_EF_I8)};
    float scratch[EF_TILE] __attribute__((aligned(64)));
    const float *src = base ? base + at : NULL;
    if (!src) {
        memset(scratch, 0, (size_t)n * 4);
        src = scratch;
    }
    if (!count) memmove(out + at, src, (size_t)n * 4);
    for (int64_t j = 0; j < count;) {
        int64_t same = j, size;
        while (same < count && u[same].dtype == u[j].dtype) same++;
        /* Equal groups: 5 updates are read as 3 and 2, not as 4 and 1. */
        size = (same - j + EF_GROUP - 1) / EF_GROUP;
        size = (same - j + size - 1) / size;
        const int last = j + size == count;
        float *dst = last ? out + at : scratch;
        of_dtype[u[j].dtype]((int)size, last && stream, dst, src, u + j, at, n, norms + j);
        src = dst;
        j += size;
    }
}

EF_TARGET static double EF(block_norm)(const ef_update *u, int64_t at, int64_t n)
{
    const int dtype = u->dtype;
    const char *p = (const char *)u->data + at * ef_size(dtype);
    EF(N) norm = EF(nzero)();
#define EF_NORM(name)                                                                                        \
    for (int64_t i = 0; i < n; i += EF_W) {                                                                  \
        EF(V) x = n - i < EF_W ? EF(load_part)(name, p, i, n - i) : EF(load)(name, p, i);                    \
        if (name == EF_I8) x = EF(vmul)(EF(vset)(u->scales[(at + i) / EF_SCALE_BLOCK]), x);                  \
        norm = EF(nadd)(norm, x);                                                                            \
    }
    switch (dtype) {
    case EF_F16: EF_NORM(EF_F16) break;
    case EF_BF16: EF_NORM(EF_BF16) break;
    case EF_I8: EF_NORM(EF_I8) break;
    default: EF_NORM(EF_F32)
    }
#undef EF_NORM
    return EF(fold)(norm);
}

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

/* Nothing but reading: the bandwidth limit that the others are measured against. */
EF_TARGET static uint64_t EF(read)(const unsigned char *p, int64_t bytes)
{
    enum { AT_ONCE = 8 };
    EF(U) sum[AT_ONCE] = {{0}};
    uint64_t all = 0;
    int64_t i = 0;
    for (; i + (int64_t)sizeof sum <= bytes; i += (int64_t)sizeof sum) {
        for (int j = 0; j < AT_ONCE; j++) {
            EF(U) x;
            memcpy(&x, p + i + j * (int64_t)sizeof x, sizeof x);
            EF_PREFETCH(p + i + j * (int64_t)sizeof x + EF_AHEAD);
            sum[j] ^= x;
        }
    }
    for (int j = 0; j < AT_ONCE; j++)
        for (size_t l = 0; l < sizeof(EF(U)) / 8; l++) all ^= sum[j][l];
    for (; i < bytes; i++) all ^= p[i];
    return all;
}

static const ef_isa EF(isa) = {EF_ISA_NAME, EF(tile), EF(block_norm), EF(words), EF(read)};

#undef EF
#undef EF_ISA_NAME
#undef EF_TARGET
#undef EF_W
