/* The part of the CPU kernels that computes modulo p = EF_PRIME = 2^32 - 5, for secure aggregation. All inputs are
 * below p. Because 2^32 is 5 modulo p, a 64-bit number is reduced by adding 5 times its upper half to its lower half
 * (a fold). */

EF_PRIM EF(U) EF(ufold)(EF(U) x) { return (x & 0xffffffffu) + (x >> 32) * 5; }
/* Return x modulo p for any 64-bit x. After two folds it is below p + 30, so at most one subtraction of p remains. */
EF_PRIM EF(U) EF(ureduced)(EF(U) x)
{
    x = EF(ufold)(EF(ufold)(x));
    return x - ((EF(U))(x >= EF_PRIME) & EF_PRIME);
}

/* out[i] = sum_k w_k * v_k[i] modulo p for four vectors U of words. The even and odd words of a vector are the lower
 * and upper halves of its 64-bit lanes. */
EF_PRIM void EF(field_words)(const ef_field_sum *s, int exact, int64_t at)
{
    enum { VECTORS = 4 };
    EF(U) even[VECTORS], odd[VECTORS];
    memset(even, 0, sizeof even);
    memset(odd, 0, sizeof odd);
    for (int64_t k = 0; k < s->count; k++) {
        const ef_loose_uint32 *v = s->v[k] + at;
        const EF(U) w = s->w[k] - (EF(U)){0};
        for (size_t line = 0; line < VECTORS * sizeof(EF(U)); line += 64)
            __builtin_prefetch((const char *)v + EF_AHEAD + line, 0, 2);
        for (int j = 0; j < VECTORS; j++) {
            EF(U) x;
            memcpy(&x, v + j * EF(WORDS), sizeof x);
            const EF(U) low = EF(uproduct)(x, w), high = EF(uproduct)(x >> 32, w);
            even[j] += exact ? low : EF(ufold)(low);
            odd[j] += exact ? high : EF(ufold)(high);
        }
    }
    for (int j = 0; j < VECTORS; j++) {
        const EF(U) made = EF(ureduced)(even[j]) | EF(ureduced)(odd[j]) << 32;
        memcpy(s->out + at + j * EF(WORDS), &made, sizeof made);
    }
}

EF_TARGET static void EF(field_sum)(const ef_field_sum *s, int64_t at, int64_t n)
{
    const int64_t step = 4 * EF(WORDS), end = at + n;
    if (s->exact)
        for (; at + step <= end; at += step) EF(field_words)(s, 1, at);
    else
        for (; at + step <= end; at += step) EF(field_words)(s, 0, at);
    for (; at < end; at++) {
        uint64_t total = 0;
        for (int64_t k = 0; k < s->count; k++) total = (total + s->w[k] * s->v[k][at] % EF_PRIME) % EF_PRIME;
        s->out[at] = (uint32_t)total;
    }
}

/* words[i] = round(floats[i] * factor) + mask[i] modulo p, for n <= EF_TILE elements from `at`. floats[i] is first
 * clipped to [-clip, clip]. Return the number of elements that clipping changed, including NaNs. */
EF_TARGET static int64_t EF(field_encode)(const ef_field_code *c, int64_t at, int64_t n)
{
    float x[EF_TILE], limited[EF_TILE];
    int32_t whole[EF_TILE], over = 0;
    const ef_loose_uint32 *mask = c->mask + at;
    ef_loose_uint32 *out = c->words + at;
    memcpy(x, c->floats + at, (size_t)n * 4);
    const int64_t padded = (n + EF_W - 1) / EF_W * EF_W;
    for (int64_t i = n; i < padded; i++) x[i] = 0.0f;
    const EF(V) top = EF(vset)(c->clip), bottom = EF(vset)(-c->clip), factor = EF(vset)(c->factor);
    for (int64_t i = 0; i < padded; i += EF_W) {
        const EF(V) v = EF(vmax)(EF(vmin)(EF(vload)(x + i), top), bottom);
        EF(vstore)(limited + i, v);
        EF(vround)(whole + i, EF(vmul)(v, factor));
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t before, after;
        memcpy(&before, x + i, 4);
        memcpy(&after, limited + i, 4);
        over += before != after;
        const uint32_t s = (uint32_t)whole[i] - (whole[i] < 0 ? 5u : 0u), t = s + mask[i];
        out[i] = t + (t < s || t >= EF_PRIME ? 5u : 0u); /* modulo 2^32, adding 5 subtracts p */
    }
    return over;
}

/* floats[i] = c[i] * factor, where c = (words - mask) modulo p is in [-(p-1)/2, (p-1)/2]. Return the largest |c|. */
EF_TARGET static uint32_t EF(field_decode)(const ef_field_code *c, int64_t at, int64_t n)
{
    ef_loose_float *__restrict x = c->floats + at;
    const ef_loose_uint32 *mask = c->mask + at, *word = c->words + at;
    const float factor = c->factor;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t w = word[i], m = mask[i], t = w - m - (w < m ? 5u : 0u);
        const int32_t q = (int32_t)(t > EF_PRIME / 2 ? t + 5u : t);
        const uint32_t size = (uint32_t)(q < 0 ? -q : q);
        largest = size > largest ? size : largest;
        x[i] = (float)q * factor;
    }
    return largest;
}
