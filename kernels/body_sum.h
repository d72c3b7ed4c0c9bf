/* The part of the CPU kernels that computes to = from + sum_j weight_j * u_j over a span, for a group of updates u_j
 * of one type.
 *
 * `count` and `dtype` are compile-time constants in every call. All functions are inlined, and the loops over updates
 * and SIMD vectors are unrolled. So each (count, dtype) has one loop, with the state of the updates in registers. */

/* State of one update of a group. */
typedef struct {
    const char *p; /* the update's first element in the span, possibly unaligned */
    EF(V) weight, scale;
    EF(N) norm;    /* lanes of the squared norm of the current tile */
    EF(V) squares; /* int8 only: sums of squares of the current scale block */
} EF(member);

/* Return the number of SIMD vectors per iteration: one cache line (64 bytes) of each update, or less where there are
 * too few registers. */
EF_PRIM int EF(vectors)(const int dtype)
{
    return dtype == EF_F32 ? EF_F32_VECTORS : dtype == EF_I8 ? 4 : EF_HALF_VECTORS;
}

/* Add the elements of an update for one iteration, which start at p, to the sum and to the norm of the update. */
EF_PRIM void EF(accumulate)(const int dtype, EF(member) *m, const char *p, EF(V) *sum)
{
    EF_UNROLL for (int v = 0; v < EF(vectors)(dtype); v++) {
        EF(V) x = EF(load)(dtype, p, v * EF_W);
        if (dtype == EF_F32) m->norm = EF(nadd_at)(m->norm, p + v * EF_W * 4);
        else if (dtype != EF_I8) m->norm = EF(nadd_half)(m->norm, x);
        else m->squares = EF(vadd_square)(m->squares, x), x = EF(vmul)(m->scale, x);
        sum[v] = EF(vadd)(sum[v], EF(vmul)(m->weight, x));
    }
}

/* Sum elements i to stop - 1 of `from` and of all updates into `to`. stop - i is a multiple of the number of elements
 * per iteration. */
EF_PRIM void EF(pass)(const int count, const int dtype, EF(member) *m, const float *from, float *to, int64_t i,
                      int64_t stop, int stream, int fresh)
{
    const int vectors = EF(vectors)(dtype), size = ef_size(dtype), width = vectors * EF_W;
    for (; i < stop; i += width) {
        EF(V) sum[4];
        /* Prefetch `from`, too: with 10 int8 updates it is more than a quarter of the bytes that are read. */
        for (int64_t l = i; fresh && l < i + width; l += 16) EF_PREFETCH(from + l + EF_AHEAD / size, EF_F32);
        EF_UNROLL for (int v = 0; v < vectors; v++) sum[v] = EF(vload)(from + i + v * EF_W);
        EF_UNROLL for (int j = 0; j < count; j++) {
            EF_PREFETCH(m[j].p + i * size + EF_AHEAD, dtype);
            EF(accumulate)(dtype, &m[j], m[j].p + i * size, sum);
        }
        EF_UNROLL for (int v = 0; v < vectors; v++) {
            if (stream) EF(vstream)(to + i + v * EF_W, sum[v]);
            else EF(vstore)(to + i + v * EF_W, sum[v]);
        }
    }
}

/* Sum the last elements of the span, which are fewer than an iteration takes. They are padded with zeros, which add
 * nothing to a norm. */
EF_PRIM void EF(remainder)(const int count, const int dtype, EF(member) *m, const float *from, float *to, int64_t i,
                           int64_t end)
{
    const int vectors = EF(vectors)(dtype), size = ef_size(dtype);
    float few[4 * EF_W] = {0};
    EF(V) sum[4];
    memcpy(few, from + i, (size_t)(end - i) * 4);
    EF_UNROLL for (int v = 0; v < vectors; v++) sum[v] = EF(vload)(few + v * EF_W);
    EF_UNROLL for (int j = 0; j < count; j++) {
        char full[16 * EF_W] = {0};
        memcpy(full, m[j].p + i * size, (size_t)((end - i) * size));
        EF(accumulate)(dtype, &m[j], full, sum);
    }
    EF_UNROLL for (int v = 0; v < vectors; v++) EF(vstore)(few + v * EF_W, sum[v]);
    memcpy(to + i, few, (size_t)(end - i) * 4);
}

EF_PRIM void EF(group)(const int count, const int dtype, const ef_group *g)
{
    const int64_t size = ef_size(dtype), width = EF(vectors)(dtype) * EF_W;
    const int64_t part = dtype == EF_I8 ? EF_SCALE_BLOCK : EF_TILE;
    EF(member) m[EF_GROUP];
    EF(V) squares[EF_GROUP][EF_LANES]; /* int8 only: sums of squares of each scale block of the tile */
    EF_UNROLL for (int j = 0; j < count; j++) {
        m[j].weight = EF(vset)(g->u[j].weight);
        m[j].p = (const char *)g->u[j].data + g->at * size;
    }
    for (int64_t tile = 0; tile < g->n; tile += EF_TILE) {
        const int64_t end = tile + EF_TILE < g->n ? tile + EF_TILE : g->n;
        EF_UNROLL for (int j = 0; j < count; j++) m[j].norm = EF(nzero)();
        if (dtype == EF_I8 && end < tile + EF_TILE) memset(squares, 0, sizeof squares);
        for (int64_t run = tile; run < end; run += part) {
            const int64_t stop = run + part < end ? run + part : end, whole = stop - (stop - run) % width;
            EF_UNROLL for (int j = 0; dtype == EF_I8 && j < count; j++) {
                m[j].scale = EF(vset)(g->u[j].scales[(g->at + run) / EF_SCALE_BLOCK]);
                m[j].squares = EF(vset)(0);
            }
            EF(pass)(count, dtype, m, g->from, g->to, run, whole, g->stream, g->fresh);
            if (whole < stop) EF(remainder)(count, dtype, m, g->from, g->to, whole, stop);
            EF_UNROLL for (int j = 0; dtype == EF_I8 && j < count; j++)
                squares[j][(run - tile) / EF_SCALE_BLOCK] = m[j].squares;
        }
        EF_UNROLL for (int j = 0; j < count; j++)
            g->norms[j + tile / EF_TILE * g->stride] =
                dtype == EF_I8 ? EF(scaled)(squares[j], g->u[j].scales + (g->at + tile) / EF_SCALE_BLOCK, end - tile)
                               : EF(folded)(m[j].norm);
    }
}

/* Call the loop that was compiled for this number of updates. */
EF_PRIM void EF(groups)(const int dtype, int count, const ef_group *g)
{
    switch (count) {
    case 1: EF(group)(1, dtype, g); return;
    case 2: EF(group)(2, dtype, g); return;
    case 3: EF(group)(3, dtype, g); return;
    case 4: EF(group)(4, dtype, g); return;
    case 5: EF(group)(5, dtype, g); return;
    default: EF(group)(6, dtype, g);
    }
}

#define EF_ONE_TYPE __attribute__((unused)) EF_TARGET static void
EF_ONE_TYPE EF(group_f32)(int count, const ef_group *g) { EF(groups)(EF_F32, count, g); }
EF_ONE_TYPE EF(group_f16)(int count, const ef_group *g) { EF(groups)(EF_F16, count, g); }
EF_ONE_TYPE EF(group_bf16)(int count, const ef_group *g) { EF(groups)(EF_BF16, count, g); }
EF_ONE_TYPE EF(group_i8)(int count, const ef_group *g) { EF(groups)(EF_I8, count, g); }
#undef EF_ONE_TYPE
