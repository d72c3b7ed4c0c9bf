/* CUDA kernels for sums and steps over tiles and for arithmetic modulo EF_PRIME, and the functions that launch them.
 *
 * Elements have the same bits as those of the reference back end: __fmul_rn and __fadd_rn round every product and every
 * sum and are never fused, updates are added in ascending order, and denormals are not flushed (no -ftz). Norms are
 * summed in double precision, in an order that depends only on the grid. So they have the same bits in every run, and
 * differ from those of the reference by less than 1e-12 (relative). */
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "edgefl_kernels.h"

#ifndef LAUNCH /* tests/cuda_shim defines a LAUNCH that runs the threads on the CPU */
#define LAUNCH(kernel, blocks, stream, ...) kernel<<<blocks, THREADS, 0, stream>>>(__VA_ARGS__)
#endif

namespace {
constexpr int THREADS = 256, WARPS = THREADS / 32, QUAD = 4;
constexpr int QUADS = 16;                     /* groups of four elements per thread */
constexpr int TILE = THREADS * QUAD * QUADS;  /* elements per thread block; larger than EF_TILE, the CPU's tile */

struct quad {
    float x[QUAD], scale; /* scale is for int8 only */
    int squares;          /* int8 only: sum of the squares of the integers */
};
struct words {
    uint64_t sum, weighted;
};
enum { NO_STEP = EF_OPTIMIZERS };

/* Load four elements from i on as floats; elements at n and above are zeros. If SUMS, add their words to the sums w. */
template <int DTYPE, bool SUMS>
__device__ __forceinline__ quad load(const ef_update &u, int64_t i, int64_t n, int64_t first, words *w)
{
    constexpr int SIZE = DTYPE == EF_F32 ? 4 : DTYPE == EF_I8 ? 1 : 2;
    quad q;
    uint32_t raw[SIZE];
    const char *p = (const char *)u.data + i * SIZE;
    if (i + QUAD <= n) {
        if (DTYPE == EF_F32) *(uint4 *)raw = __ldcs((const uint4 *)p);
        else if (DTYPE == EF_I8) raw[0] = __ldcs((const uint32_t *)p);
        else *(uint2 *)raw = __ldcs((const uint2 *)p);
    } else {
#pragma unroll
        for (int b = 0; b < QUAD * SIZE; b++) {
            if (b % 4 == 0) raw[b / 4] = 0;
            if (b < (int)(n - i) * SIZE) raw[b / 4] |= (uint32_t)(unsigned char)p[b] << (8 * (b % 4));
        }
    }
    /* Loops are unrolled, because arrays stay in registers only if all indices are compile-time constants. */
    if (SUMS) {
        const uint64_t at = (uint64_t)(first + i) * SIZE / 4 + 1;
#pragma unroll
        for (int j = 0; j < (int)(sizeof raw / 4); j++) {
            w->sum += raw[j];
            w->weighted += (at + j) * raw[j];
        }
    }
    q.scale = DTYPE == EF_I8 ? u.scales[i / EF_SCALE_BLOCK] : 1.0f;
    q.squares = 0;
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        if (DTYPE == EF_F32) q.x[j] = __uint_as_float(raw[j]);
        else if (DTYPE == EF_BF16) q.x[j] = __uint_as_float(raw[j / 2] >> (16 * (j % 2)) << 16);
        else if (DTYPE == EF_F16) q.x[j] = __half2float(__ushort_as_half((unsigned short)(raw[j / 2] >> (16 * (j % 2)))));
        else {
            const int value = (int8_t)(raw[0] >> (8 * j));
            q.squares += value * value;
            q.x[j] = __fmul_rn(q.scale, (float)value);
        }
    }
    return q;
}

/* Add weight * update to `total` for the tile of this thread block. Set *partial to the warp's part of the squared
 * norm. */
template <int DTYPE, bool SUMS>
__device__ __forceinline__ void accumulate(quad (&total)[QUADS], const ef_update &u, int64_t start, int64_t n,
                                           int64_t first, double *partial, words *sums)
{
    double norm = 0.0;
    words w = {0, 0};
#pragma unroll
    for (int g = 0; g < QUADS; g++) {
        const int64_t i = start + (int64_t)g * THREADS * QUAD;
        if (i >= n) continue;
        const quad q = load<DTYPE, SUMS>(u, i, n, first, &w);
#pragma unroll
        for (int j = 0; j < QUAD; j++) {
            total[g].x[j] = __fadd_rn(total[g].x[j], __fmul_rn(u.weight, q.x[j]));
            if (DTYPE != EF_I8) norm = __fma_rn((double)q.x[j], (double)q.x[j], norm); /* products are exact */
        }
        if (DTYPE == EF_I8) norm = __fma_rn((double)q.scale * (double)q.scale, (double)q.squares, norm);
    }
    for (int d = 16; d; d /= 2) {
        norm = __dadd_rn(norm, __shfl_down_sync(~0u, norm, d));
        if (SUMS) w.sum += __shfl_down_sync(~0u, w.sum, d), w.weighted += __shfl_down_sync(~0u, w.weighted, d);
    }
    if (threadIdx.x % 32) return;
    *partial = norm;
    if (SUMS) {
        atomicAdd((unsigned long long *)&sums->sum, (unsigned long long)w.sum);
        atomicAdd((unsigned long long *)&sums->weighted, (unsigned long long)w.weighted);
    }
}

__device__ __forceinline__ float sign(float x)
{
    return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? 0.0f : x;
}

/* Compute one element of a step (see ef_step). */
template <int KIND>
__device__ __forceinline__ void step(const ef_step &s, int64_t i, float g)
{
    float a, b, direction;
    if (KIND == EF_MOMENTUM) {
        direction = a = __fadd_rn(__fmul_rn(s.old_a[i], s.keep1), g);
    } else {
        const float squared = __fmul_rn(g, g), old = s.old_b[i];
        a = __fadd_rn(__fmul_rn(s.old_a[i], s.keep1), __fmul_rn(g, s.add1));
        if (KIND == EF_ADAGRAD) b = __fadd_rn(old, squared);
        else if (KIND == EF_ADAM) b = __fadd_rn(__fmul_rn(old, s.keep2), __fmul_rn(squared, s.add2));
        else b = __fsub_rn(old, __fmul_rn(__fmul_rn(squared, sign(__fsub_rn(old, squared))), s.add2));
        s.new_b[i] = b;
        direction = __fdiv_rn(a, __fadd_rn(__fsqrt_rn(b), s.epsilon));
    }
    s.new_a[i] = a;
    s.out[i] = __fadd_rn(s.base[i], __fmul_rn(direction, s.lr));
}

/* Sum one tile per thread block. The sum stays in registers, and each thread has QUADS wide loads of an update in
 * flight. `first` is the index of out[0] in the whole vector. `partial` has tiles x count x WARPS elements, and `sums`
 * has `count` elements. */
template <int KIND, bool SUMS>
__global__ void __launch_bounds__(THREADS) sum_tiles(float *out, const float *base, const ef_update *u, int64_t count,
                                                     int64_t n, int64_t first, double *partial, words *sums, ef_step s)
{
    const int64_t start = (int64_t)blockIdx.x * TILE + threadIdx.x * QUAD;
    quad total[QUADS];
#pragma unroll
    for (int g = 0; g < QUADS; g++) {
        const int64_t i = start + (int64_t)g * THREADS * QUAD;
        float4 whole = {0.0f, 0.0f, 0.0f, 0.0f};
        if (base && i + QUAD <= n) whole = *(const float4 *)(base + i);
        else if (base && i < n) {
            whole.x = base[i];
            if (i + 1 < n) whole.y = base[i + 1];
            if (i + 2 < n) whole.z = base[i + 2];
        }
        total[g] = {{whole.x, whole.y, whole.z, whole.w}, 1.0f, 0};
    }
    for (int64_t k = 0; k < count; k++) {
        double *share = partial + ((int64_t)blockIdx.x * count + k) * WARPS + threadIdx.x / 32;
        words *w = SUMS ? sums + k : nullptr;
        switch (u[k].dtype) {
        case EF_F16: accumulate<EF_F16, SUMS>(total, u[k], start, n, first, share, w); break;
        case EF_BF16: accumulate<EF_BF16, SUMS>(total, u[k], start, n, first, share, w); break;
        case EF_I8: accumulate<EF_I8, SUMS>(total, u[k], start, n, first, share, w); break;
        default: accumulate<EF_F32, SUMS>(total, u[k], start, n, first, share, w);
        }
    }
#pragma unroll
    for (int g = 0; g < QUADS; g++) {
        const int64_t i = start + (int64_t)g * THREADS * QUAD;
        const quad &t = total[g];
        if (KIND == NO_STEP && i + QUAD <= n) {
            __stcs((float4 *)(out + i), make_float4(t.x[0], t.x[1], t.x[2], t.x[3]));
            continue;
        }
#pragma unroll
        for (int j = 0; j < QUAD; j++) {
            if (i + j >= n) continue;
            if (KIND == NO_STEP) out[i + j] = t.x[j];
            else step<KIND == NO_STEP ? EF_MOMENTUM : KIND>(s, i + j, t.x[j]);
        }
    }
}

/* Set norms[k] to the sum of the partial norms of all tiles and warps. The order of the sum depends only on their
 * number. */
__global__ void __launch_bounds__(THREADS) add_norms(const double *partial, int64_t tiles, int64_t count, double *norms)
{
    __shared__ double shares[THREADS];
    const int64_t k = blockIdx.x;
    double sum = 0.0;
    for (int64_t t = threadIdx.x; t < tiles * WARPS; t += THREADS)
        sum = __dadd_rn(sum, partial[(t / WARPS * count + k) * WARPS + t % WARPS]);
    shares[threadIdx.x] = sum;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shares[threadIdx.x] = __dadd_rn(shares[threadIdx.x], shares[threadIdx.x + half]);
    }
    if (!threadIdx.x) norms[k] = shares[0];
}

template <int KIND>
void launch(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, int64_t first, double *partial,
            words *sums, const ef_step &s, cudaStream_t stream)
{
    const unsigned tiles = (unsigned)((n + TILE - 1) / TILE);
    if (sums) LAUNCH((sum_tiles<KIND, true>), tiles, stream, out, base, u, count, n, first, partial, sums, s);
    else LAUNCH((sum_tiles<KIND, false>), tiles, stream, out, base, u, count, n, first, partial, sums, s);
}

void sum_part(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, int64_t first, double *partial,
              words *sums, const ef_step *step, cudaStream_t stream)
{
    const ef_step s = step ? *step : ef_step{};
    switch (step ? s.kind : NO_STEP) {
    case EF_MOMENTUM: return launch<EF_MOMENTUM>(out, base, u, count, n, first, partial, sums, s, stream);
    case EF_ADAM: return launch<EF_ADAM>(out, base, u, count, n, first, partial, sums, s, stream);
    case EF_YOGI: return launch<EF_YOGI>(out, base, u, count, n, first, partial, sums, s, stream);
    case EF_ADAGRAD: return launch<EF_ADAGRAD>(out, base, u, count, n, first, partial, sums, s, stream);
    default: return launch<NO_STEP>(out, base, u, count, n, first, partial, sums, s, stream);
    }
}

/* ---- arithmetic modulo EF_PRIME: see body_field.h --------------------------------------------------------------- */

constexpr int FIELD_QUADS = 4;                           /* groups of four numbers per thread */
constexpr int FIELD_TILE = THREADS * QUAD * FIELD_QUADS; /* numbers per thread block */

/* Return a number below 6 * 2^32 that is congruent to x modulo EF_PRIME. 2^32 is congruent to 5. */
__device__ __forceinline__ uint64_t folded(uint64_t x) { return (x & 0xffffffffu) + (x >> 32) * 5; }

/* out[i] = sum_k w_k * v_k[i] modulo EF_PRIME, one tile per thread block. */
__global__ void __launch_bounds__(THREADS) field_tiles(uint32_t *out, const uint32_t *const *v, const uint64_t *w,
                                                       int64_t count, int64_t n)
{
    const int64_t start = (int64_t)blockIdx.x * FIELD_TILE + threadIdx.x * QUAD;
    uint64_t total[FIELD_QUADS][QUAD];
#pragma unroll
    for (int g = 0; g < FIELD_QUADS; g++)
#pragma unroll
        for (int j = 0; j < QUAD; j++) total[g][j] = 0;
    for (int64_t k = 0; k < count; k++) {
        const uint32_t *from = v[k];
        const uint64_t weight = w[k];
#pragma unroll
        for (int g = 0; g < FIELD_QUADS; g++) {
            const int64_t i = start + (int64_t)g * THREADS * QUAD;
            uint4 x = {0, 0, 0, 0};
            if (i + QUAD <= n) x = __ldcs((const uint4 *)(from + i));
            else if (i < n) {
                x.x = from[i];
                if (i + 1 < n) x.y = from[i + 1];
                if (i + 2 < n) x.z = from[i + 2];
            }
            total[g][0] += folded(weight * x.x), total[g][1] += folded(weight * x.y);
            total[g][2] += folded(weight * x.z), total[g][3] += folded(weight * x.w);
        }
    }
#pragma unroll
    for (int g = 0; g < FIELD_QUADS; g++)
#pragma unroll
        for (int j = 0; j < QUAD; j++) {
            const int64_t i = start + (int64_t)g * THREADS * QUAD + j;
            const uint64_t x = folded(folded(total[g][j]));
            if (i < n) out[i] = (uint32_t)(x >= EF_PRIME ? x - EF_PRIME : x);
        }
}

/* words[i] = round(floats[i] * factor) + mask[i] modulo EF_PRIME, where floats[i] is first clipped to [-clip, clip].
 * Add the number of elements that clipping changed, including NaNs, to *over. There is one element per thread. words
 * and mask may be the same array. */
__global__ void __launch_bounds__(THREADS) encode_field(const float *floats, uint32_t *words, const uint32_t *mask,
                                                        int64_t n, float clip, float factor, unsigned *over)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    unsigned limited = 0;
    if (i < n) {
        const float x = floats[i], below = x < clip ? x : clip, v = below > -clip ? below : -clip;
        limited = !(v == x);
        const int whole = __float2int_rn(__fmul_rn(v, factor));
        const uint32_t s = (uint32_t)whole - (whole < 0 ? 5u : 0u), t = s + mask[i];
        words[i] = t + (t < s || t >= EF_PRIME ? 5u : 0u); /* modulo 2^32, adding 5 subtracts EF_PRIME */
    }
    for (int d = 16; d; d /= 2) limited += __shfl_down_sync(~0u, limited, d);
    if (threadIdx.x % 32 == 0 && limited) atomicAdd(over, limited);
}

/* floats[i] = c[i] * factor, where c = (words - mask) modulo p = EF_PRIME is in [-(p-1)/2, (p-1)/2]. Set *largest to
 * the largest |c| if that is larger. There is one element per thread. */
__global__ void __launch_bounds__(THREADS) decode_field(float *floats, const uint32_t *words, const uint32_t *mask,
                                                        int64_t n, float factor, unsigned *largest)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    unsigned size = 0;
    if (i < n) {
        const uint32_t t = words[i] - mask[i] - (words[i] < mask[i] ? 5u : 0u);
        const int c = (int)(t > EF_PRIME / 2 ? t + 5u : t);
        size = (unsigned)(c < 0 ? -c : c);
        floats[i] = __fmul_rn(__int2float_rn(c), factor);
    }
    for (int d = 16; d; d /= 2) {
        const unsigned other = __shfl_down_sync(~0u, size, d);
        size = other > size ? other : size;
    }
    if (threadIdx.x % 32 == 0) atomicMax(largest, size);
}

} // namespace
