/* The CPU kernels. cpu.c includes this file once for each instruction set, after the simd_*.h of that set, which
 * defines the vector V of EF_W floats and the norm accumulator N of EF_LANES doubles.
 *
 * All element types use the same loops; only the load differs. All instruction sets give the same bits, because every
 * product and every sum is rounded (-ffp-contract=off), updates are added in ascending order, and the norm of a tile
 * is summed in EF_LANES interleaved lanes. */

EF_PRIM EF(V) EF(load)(const int dtype, const char *p, int64_t i)
{
    switch (dtype) {
    case EF_F16: return EF(vload_f16)(p + 2 * i);
    case EF_BF16: return EF(vload_bf16)(p + 2 * i);
    case EF_I8: return EF(vload_i8)(p + i);
    default: return EF(vload)(p + 4 * i);
    }
}

/* Load the last n < EF_W elements, padded with zeros (which add nothing to a norm). */
EF_PRIM EF(V) EF(load_part)(const int dtype, const char *p, int64_t i, int64_t n)
{
    char full[4 * EF_W] = {0};
    memcpy(full, p + i * ef_size(dtype), (size_t)(n * ef_size(dtype)));
    return EF(load)(dtype, full, 0);
}

EF_PRIM double EF(fold)(const double *l)
{
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

EF_PRIM double EF(folded)(EF(N) n)
{
    double l[EF_LANES];
    EF(nstore)(l, n);
    return EF(fold)(l);
}

/* Return the squared norm of a tile of n int8 elements. `squares` has the sum of squares of each scale block, and
 * zeros after the last block. Each block is one lane of the norm. The square of its scale is exact in a double. */
EF_PRIM double EF(scaled)(const EF(V) *squares, const ef_loose_float *scales, int64_t n)
{
    const int64_t blocks = (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK;
    float sums[EF_LANES], scale[EF_LANES] = {0};
    double lanes[EF_LANES];
    if (blocks == EF_LANES) memcpy(scale, scales, sizeof scale);
    else memcpy(scale, scales, (size_t)blocks * 4);
    EF(vsums)(sums, squares);
    for (int b = 0; b < EF_LANES; b++) lanes[b] = (double)scale[b] * (double)scale[b] * (double)sums[b];
    return EF(fold)(lanes);
}

#define EF_UNROLL _Pragma("GCC unroll 6")
#include "body_sum.h"

#ifdef EF_ZEN4
/* On Zen 4, special kernels are used for 16-bit types only. For everything else, the AVX-512 kernels are faster. */
static const ef_isa EF(isa) = {
    EF_ISA_NAME,
    {group_f32_avx512, EF(group_f16), EF(group_bf16), group_i8_avx512},
    EF_GROUP_SIZES,
    step_avx512,
    quantize_avx512,
    block_norm_avx512,
    words_avx512,
    delta_avx512,
    trimmed_avx512,
    products_avx512,
    field_sum_avx512,
    field_encode_avx512,
    field_decode_avx512,
};
#else
/* Return the squared norm of n <= EF_TILE elements. */
EF_PRIM double EF(norm)(const int dtype, const char *p, const ef_loose_float *scales, int64_t n)
{
    EF(N) norm = EF(nzero)();
    EF(V) squares[EF_LANES];
    if (dtype != EF_I8) {
        int64_t i = 0;
        for (; i + EF_W <= n; i += EF_W) norm = EF(nadd)(norm, EF(load)(dtype, p, i));
        if (i < n) norm = EF(nadd)(norm, EF(load_part)(dtype, p, i, n - i));
        return EF(folded)(norm);
    }
    memset(squares, 0, sizeof squares);
    for (int64_t run = 0; run < n; run += EF_SCALE_BLOCK) {
        const int64_t end = run + EF_SCALE_BLOCK < n ? run + EF_SCALE_BLOCK : n;
        EF(V) sum[4] = {EF(vset)(0), EF(vset)(0), EF(vset)(0), EF(vset)(0)};
        int64_t i = run;
        for (; i + 4 * EF_W <= end; i += 4 * EF_W)
            for (int v = 0; v < 4; v++) sum[v] = EF(vadd_square)(sum[v], EF(load)(dtype, p, i + v * EF_W));
        for (; i < end; i += EF_W) {
            const int64_t left = end - i < EF_W ? end - i : EF_W;
            sum[0] = EF(vadd_square)(sum[0], EF(load_part)(dtype, p, i, left));
        }
        squares[run / EF_SCALE_BLOCK] = EF(vadd)(EF(vadd)(sum[0], sum[1]), EF(vadd)(sum[2], sum[3]));
    }
    return EF(scaled)(squares, scales, n);
}

EF_TARGET static double EF(block_norm)(const ef_update *u, int64_t at, int64_t n)
{
    const char *p = (const char *)u->data + at * ef_size(u->dtype);
    switch (u->dtype) {
    case EF_F16: return EF(norm)(EF_F16, p, NULL, n);
    case EF_BF16: return EF(norm)(EF_BF16, p, NULL, n);
    case EF_I8: return EF(norm)(EF_I8, p, u->scales + at / EF_SCALE_BLOCK, n);
    default: return EF(norm)(EF_F32, p, NULL, n);
    }
}

/* Sums of the even and the odd 32-bit words, in 64-bit lanes. `later_even` and `later_odd` are sums of the running
 * sums. They give the checksum's weighted sum without a multiplication per word: sum_j j*w_j = rounds*sum - later. */
typedef struct { EF(U) even, odd, later_even, later_odd; } EF(W);
enum { EF(WORDS) = sizeof(EF(U)) / 4 };

EF_PRIM void EF(wadd)(EF(W) *w, const void *p)
{
    EF(U) x;
    memcpy(&x, p, sizeof x);
    w->even += x & 0xffffffffu;
    w->odd += x >> 32;
    w->later_even += w->even;
    w->later_odd += w->odd;
}

/* Add the sum and the weighted sum of `rounds` rounds of words to s. The first of these words has the index `at`. */
EF_PRIM void EF(wfold)(const EF(W) *w, uint64_t rounds, uint64_t at, uint64_t s[2])
{
    uint64_t s1 = 0, s2 = 0;
    for (int l = 0; l < EF(WORDS) / 2; l++) {
        s1 += w->even[l] + w->odd[l];
        s2 += EF(WORDS) * (rounds * (w->even[l] + w->odd[l]) - (w->later_even[l] + w->later_odd[l]));
        s2 += (uint64_t)(2 * l + 1) * w->even[l] + (uint64_t)(2 * l + 2) * w->odd[l];
    }
    s[0] += s1;
    s[1] += s2 + at * s1;
}

EF_TARGET static void EF(words)(const unsigned char *p, int64_t n, uint64_t s[2])
{
    EF(W) w = {{0}, {0}, {0}, {0}};
    const int64_t rounds = n / EF(WORDS);
    for (int64_t r = 0; r < rounds; r++) EF(wadd)(&w, p + r * (int64_t)sizeof(EF(U)));
    EF(wfold)(&w, (uint64_t)rounds, 0, s);
    for (int64_t i = rounds * EF(WORDS); i < n; i++) {
        uint32_t word;
        memcpy(&word, p + 4 * i, 4);
        s[0] += word;
        s[1] += (uint64_t)(i + 1) * word;
    }
}

#include "body_delta.h"
#include "body_order.h"
#include "body_step.h"
#include "body_quantize.h"
#include "body_field.h"

static const ef_isa EF(isa) = {
    EF_ISA_NAME,
    {EF(group_f32), EF(group_f16), EF(group_bf16), EF(group_i8)},
    EF_GROUP_SIZES,
    EF(step),
    EF(quantize),
    EF(block_norm),
    EF(words),
    EF(delta),
    EF(trimmed),
    EF(products),
    EF(field_sum),
    EF(field_encode),
    EF(field_decode),
};
#endif

#undef EF_UNROLL
#undef EF
#undef EF_ISA_NAME
#undef EF_TARGET
#undef EF_W
#undef EF_F32_VECTORS
#undef EF_HALF_VECTORS
#undef EF_GROUP_SIZES
