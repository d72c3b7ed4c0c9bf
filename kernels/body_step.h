/* The part of the CPU kernels that applies the server optimiser's step to the sum of one span (see ef_step). */

typedef struct {
    EF(V) keep1, add1, keep2, add2, epsilon, lr;
} EF(constants);

/* Return one SIMD vector of the next model. a and b are the optimiser's state, which is updated in place. */
EF_PRIM EF(V) EF(next)(const int kind, const EF(constants) *c, EF(V) base, EF(V) g, EF(V) *a, EF(V) *b)
{
    if (kind == EF_MOMENTUM) {
        *a = EF(vadd)(EF(vmul)(*a, c->keep1), g);
        return EF(vadd)(base, EF(vmul)(*a, c->lr));
    }
    const EF(V) squared = EF(vmul)(g, g);
    *a = EF(vadd)(EF(vmul)(*a, c->keep1), EF(vmul)(g, c->add1));
    if (kind == EF_ADAGRAD) *b = EF(vadd)(*b, squared);
    else if (kind == EF_ADAM) *b = EF(vadd)(EF(vmul)(*b, c->keep2), EF(vmul)(squared, c->add2));
    else *b = EF(vsub)(*b, EF(vmul)(EF(vmul)(squared, EF(vsign)(EF(vsub)(*b, squared))), c->add2));
    const EF(V) direction = EF(vdiv)(*a, EF(vadd)(EF(vsqrt)(*b), c->epsilon));
    return EF(vadd)(base, EF(vmul)(direction, c->lr));
}

EF_PRIM void EF(step_kind)(const int kind, const int stream, const ef_step *s, const float *g, int64_t at,
                           int64_t n)
{
    const EF(constants) c = {EF(vset)(s->keep1), EF(vset)(s->add1), EF(vset)(s->keep2),
                             EF(vset)(s->add2), EF(vset)(s->epsilon), EF(vset)(s->lr)};
    const int adaptive = kind != EF_MOMENTUM;
    const float *base = s->base + at, *old_a = s->old_a + at, *old_b = adaptive ? s->old_b + at : NULL;
    float *out = s->out + at, *new_a = s->new_a + at, *new_b = adaptive ? s->new_b + at : NULL;
    int64_t i = 0;
    for (; i + EF_W <= n; i += EF_W) {
        EF(V) a = EF(vload)(old_a + i), b = a, model;
        if (adaptive) b = EF(vload)(old_b + i);
        model = EF(next)(kind, &c, EF(vload)(base + i), EF(vload)(g + i), &a, &b);
        if (stream) {
            EF(vstream)(out + i, model);
            EF(vstream)(new_a + i, a);
            if (adaptive) EF(vstream)(new_b + i, b);
        } else {
            EF(vstore)(out + i, model);
            EF(vstore)(new_a + i, a);
            if (adaptive) EF(vstore)(new_b + i, b);
        }
    }
    if (i < n) {
        const size_t bytes = (size_t)(n - i) * 4;
        float part[4][EF_W] = {{0}};
        memcpy(part[0], base + i, bytes);
        memcpy(part[1], g + i, bytes);
        memcpy(part[2], old_a + i, bytes);
        if (adaptive) memcpy(part[3], old_b + i, bytes);
        EF(V) a = EF(vload)(part[2]), b = EF(vload)(part[3]);
        EF(vstore)(part[0], EF(next)(kind, &c, EF(vload)(part[0]), EF(vload)(part[1]), &a, &b));
        EF(vstore)(part[2], a);
        EF(vstore)(part[3], b);
        memcpy(out + i, part[0], bytes);
        memcpy(new_a + i, part[2], bytes);
        if (adaptive) memcpy(new_b + i, part[3], bytes);
    }
}

EF_TARGET static void EF(step)(const ef_step *s, int stream, const float *g, int64_t at, int64_t n)
{
#define EF_KIND(kind)                                                                                        \
    case kind:                                                                                               \
        if (stream) EF(step_kind)(kind, 1, s, g, at, n);                                                     \
        else EF(step_kind)(kind, 0, s, g, at, n);                                                            \
        return;
    switch (s->kind) { EF_KIND(EF_MOMENTUM) EF_KIND(EF_ADAM) EF_KIND(EF_YOGI) EF_KIND(EF_ADAGRAD) }
#undef EF_KIND
}
