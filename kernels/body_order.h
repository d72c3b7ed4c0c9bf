/* The part of the CPU kernels that combines the same element of all updates: trimmed means and inner products. */

/* Decode elements at <= i < at + n of an update into x, and pad x with zeros to `width` elements. `at` is a multiple
 * of 32. */
EF_PRIM void EF(decode_as)(const int dtype, const ef_update *u, int64_t at, int64_t n, int64_t width, float *x)
{
    const char *p = (const char *)u->data + at * ef_size(dtype);
    for (int64_t i = 0; i < width; i += EF_W) {
        EF(V) v = EF(vset)(0);
        if (i + EF_W <= n) v = EF(load)(dtype, p, i);
        else if (i < n) v = EF(load_part)(dtype, p, i, n - i);
        if (dtype == EF_I8 && i < n) v = EF(vmul)(EF(vset)(u->scales[(at + i) / EF_SCALE_BLOCK]), v);
        if (i * ef_size(dtype) % 64 == 0) EF_PREFETCH(p + i * ef_size(dtype) + EF_AHEAD, dtype);
        EF(vstore)(x + i, v);
    }
}

EF_PRIM void EF(decode)(const ef_update *u, int64_t at, int64_t n, int64_t width, float *x)
{
    switch (u->dtype) {
    case EF_F16: EF(decode_as)(EF_F16, u, at, n, width, x); return;
    case EF_BF16: EF(decode_as)(EF_BF16, u, at, n, width, x); return;
    case EF_I8: EF(decode_as)(EF_I8, u, at, n, width, x); return;
    default: EF(decode_as)(EF_F32, u, at, n, width, x);
    }
}

/* For each i < width, move the smaller of low[i] and high[i] to low[i] and the larger to high[i]. `width` is a
 * multiple of 32. */
EF_PRIM void EF(exchange)(float *restrict low, float *restrict high, int64_t width)
{
    for (int64_t i = 0; i < width; i += 32) {
        _Pragma("GCC unroll 4") for (int l = 0; l < 32; l += EF_W) {
            const EF(V) a = EF(vload)(low + i + l), b = EF(vload)(high + i + l);
            EF(vstore)(low + i + l, EF(vmin)(b, a));
            EF(vstore)(high + i + l, EF(vmax)(a, b));
        }
    }
}

/* For n elements from `at`, a multiple of EF_TILE, compute the mean over the updates without the `trim` smallest and
 * the `trim` largest values. */
EF_TARGET static void EF(trimmed)(const ef_order *o, int64_t at, int64_t n)
{
    const int64_t width = ef_order_width(o->count), kept = o->count - 2 * o->trim;
    float x[o->count * width] __attribute__((aligned(64)));
    double sums[width];
    for (int64_t i = 0; i < n; i += width) {
        const int64_t m = n - i < width ? n - i : width;
        for (int64_t k = 0; k < o->count; k++) EF(decode)(&o->u[k], at + i, m, width, x + k * width);
        for (int64_t p = 0; p < o->pairs; p++)
            EF(exchange)(x + o->network[2 * p] * width, x + o->network[2 * p + 1] * width, width);
        memset(sums, 0, sizeof sums);
        for (int64_t r = o->trim; r < o->count - o->trim; r++)
            for (int64_t e = 0; e < width; e++) sums[e] += (double)x[r * width + e];
        for (int64_t e = 0; e < m; e++) o->out[at + i + e] = (float)(sums[e] / (double)kept);
    }
}

/* Compute the inner products of all pairs j <= k of updates over n elements from `at`, in the order (0,0), (0,1), …,
 * (1,1), …. Each is the sum of EF_LANES interleaved lanes. `lanes` is scratch memory of EF_LANES doubles per pair. */
EF_TARGET static void EF(products)(const ef_order *o, int64_t at, int64_t n, double *lanes, double *out)
{
    const int64_t width = ef_order_width(o->count), pairs = o->count * (o->count + 1) / 2;
    float x[o->count * width] __attribute__((aligned(64)));
    memset(lanes, 0, (size_t)pairs * EF_LANES * sizeof *lanes);
    for (int64_t i = 0; i < n; i += width) {
        const int64_t m = n - i < width ? n - i : width;
        double *l = lanes;
        for (int64_t k = 0; k < o->count; k++) EF(decode)(&o->u[k], at + i, m, width, x + k * width);
        for (int64_t j = 0; j < o->count; j++)
            for (int64_t k = j; k < o->count; k++, l += EF_LANES) {
                const float *a = x + j * width, *b = x + k * width;
                double s[EF_LANES];
                memcpy(s, l, sizeof s);
                for (int64_t e = 0; e < width; e += EF_LANES)
                    for (int c = 0; c < EF_LANES; c++) s[c] += (double)a[e + c] * (double)b[e + c];
                memcpy(l, s, sizeof s);
            }
    }
    for (int64_t p = 0; p < pairs; p++) out[p] = EF(fold)(lanes + p * EF_LANES);
}
