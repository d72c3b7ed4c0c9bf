/* The part of the CPU kernels that rounds a float32 vector to the type of an update. It works block by block, so that
 * values that are read twice are still in the cache. The compiler vectorises these loops for each instruction set. */

/* Return the bits of the largest |y[i]|. Bits are compared as integers, so that NaN > infinity > finite numbers. */
EF_PRIM uint32_t EF(largest)(const float *y, int64_t n)
{
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, y + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

/* Round a block to integers in [-127, 127] and return their scale. If the block contains a value that is not finite,
 * the integers are 0 and the scale is NaN. */
EF_PRIM float EF(to_i8)(int8_t *out, const float *y, int64_t n)
{
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding this rounds a float to an integer, ties to even */
    const uint32_t bits = EF(largest)(y, n);
    float most, scale;
    memcpy(&most, &bits, 4);
    scale = bits < 0x7f800000 ? most / 127.0f : __builtin_nanf("");
    if (!(scale > 0.0f)) { /* all values are 0 or so small that the scale is 0, or one is not finite */
        memset(out, 0, (size_t)n);
        return scale;
    }
    for (int64_t i = 0; i < n; i++) {
        float q = y[i] / scale;
        q = q > 127.0f ? 127.0f : q;
        q = q < -127.0f ? -127.0f : q;
        out[i] = (int8_t)(int32_t)((q + to_integer) - to_integer);
    }
    return scale;
}

EF_PRIM void EF(to_bf16)(ef_loose_uint16 *out, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits, rounded;
        memcpy(&bits, y + i, 4);
        rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
}

EF_PRIM void EF(to_f16)(char *out, const float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + EF_W <= n; i += EF_W) EF(vstore_f16)(out + 2 * i, EF(vload)(y + i));
    if (i < n) {
        char part[2 * EF_W];
        EF(vstore_f16)(part, EF(vload)(y + i)); /* y always has EF_SCALE_BLOCK elements */
        memcpy(out + 2 * i, part, (size_t)(n - i) * 2);
    }
}

/* Compute the rounding error left = y - decoded(out), for error feedback. It is set to 0 where it is not finite, so
 * that a bad update does not corrupt later ones. */
EF_PRIM void EF(leave)(ef_loose_float *left, const float *y, const int dtype, const char *out, float scale, int64_t n)
{
    float block[EF_SCALE_BLOCK];
    for (int64_t i = 0; i < n; i += EF_W) {
        EF(V) x = n - i < EF_W ? EF(load_part)(dtype, out, i, n - i) : EF(load)(dtype, out, i);
        if (dtype == EF_I8) x = EF(vmul)(EF(vset)(scale), x);
        EF(vstore)(block + i, EF(vsub)(EF(vload)(y + i), x));
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, block + i, 4);
        bits = (bits & 0x7f800000) == 0x7f800000 ? 0 : bits;
        memcpy(left + i, &bits, 4);
    }
}

EF_TARGET static void EF(quantize)(const ef_quantization *q, int64_t at, int64_t n)
{
    float y[EF_SCALE_BLOCK] = {0};
    for (int64_t run = 0; run < n; run += EF_SCALE_BLOCK) {
        const int64_t m = n - run < EF_SCALE_BLOCK ? n - run : EF_SCALE_BLOCK, first = at + run;
        const ef_loose_float *x = q->x + first, *residual = q->residual ? q->residual + first : NULL;
        const float w = q->weight;
        char *out = (char *)q->out + first * ef_size(q->dtype);
        float scale = 0.0f;
        for (int64_t i = 0; i < m; i++) y[i] = w * x[i];
        for (int64_t i = 0; residual && i < m; i++) y[i] += residual[i];
        switch (q->dtype) {
        case EF_F16: EF(to_f16)(out, y, m); break;
        case EF_BF16: EF(to_bf16)((ef_loose_uint16 *)out, y, m); break;
        case EF_I8: scale = q->scales[first / EF_SCALE_BLOCK] = EF(to_i8)((int8_t *)out, y, m); break;
        default: memcpy(out, y, (size_t)m * 4);
        }
        if (!q->left) continue;
        switch (q->dtype) {
        case EF_F16: EF(leave)(q->left + first, y, EF_F16, out, scale, m); break;
        case EF_BF16: EF(leave)(q->left + first, y, EF_BF16, out, scale, m); break;
        case EF_I8: EF(leave)(q->left + first, y, EF_I8, out, scale, m); break;
        default: EF(leave)(q->left + first, y, EF_F32, out, scale, m);
        }
    }
}
