/* The part of the body that sums exactly: sum[i] = sum[i] + w_j * u_j[i] in doubles, rounded once. */

/* Eight elements of each of `count` updates, into the sums and the updates' norms. */
EF_PRIM void EF(eight)(const int count, const char *const *p, const EF(N) *weights, EF(N) *norms, double *sum)
{
    EF(N) s = EF(nload)(sum);
    EF_UNROLL for (int j = 0; j < count; j++) {
        const EF(N) x = EF(nwiden)(p[j]);
        norms[j] = EF(nfma)(x, x, norms[j]);
        s = EF(nfma)(weights[j], x, s);
    }
    EF(nstore)(sum, s);
}

EF_PRIM void EF(exactly)(const int count, const ef_exact *g)
{
    EF(N) weights[EF_GROUP], norms[EF_GROUP];
    const char *p[EF_GROUP];
    int64_t i = 0;
    EF_UNROLL for (int j = 0; j < count; j++) {
        weights[j] = EF(nset)(g->weights[j]), norms[j] = EF(nzero)(), p[j] = (const char *)g->u[j];
    }
    for (; i + 16 <= g->n; i += 16) {
        EF_UNROLL for (int j = 0; j < count; j++) EF_PREFETCH(p[j] + EF_AHEAD, EF_F32);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            EF(eight)(count, p, weights, norms, g->sum + i + 8 * half);
            EF_UNROLL for (int j = 0; j < count; j++) p[j] += 32;
        }
    }
    for (; i < g->n; i += 8) { /* followed by zeros, which add nothing */
        const int64_t left = g->n - i < 8 ? g->n - i : 8;
        float few[EF_GROUP][8] = {{0}};
        double sum[8] = {0};
        const char *at[EF_GROUP];
        for (int j = 0; j < count; j++) memcpy(few[j], p[j], (size_t)left * 4), at[j] = (const char *)few[j], p[j] += 32;
        memcpy(sum, g->sum + i, (size_t)left * 8);
        EF(eight)(count, at, weights, norms, sum);
        memcpy(g->sum + i, sum, (size_t)left * 8);
    }
    EF_UNROLL for (int j = 0; j < count; j++) g->norms[j] = EF(folded)(norms[j]);
}

/* A loop for each number of updates. */
EF_TARGET static void EF(exact)(int count, const ef_exact *g)
{
    switch (count) {
    case 1: EF(exactly)(1, g); return;
    case 2: EF(exactly)(2, g); return;
    case 3: EF(exactly)(3, g); return;
    case 4: EF(exactly)(4, g); return;
    case 5: EF(exactly)(5, g); return;
    default: EF(exactly)(6, g);
    }
}
