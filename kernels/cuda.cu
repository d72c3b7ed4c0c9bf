/* The CUDA back end: sums and steps over device memory, and over host memory through a pipeline that copies
 * one chunk while it sums another. A shared library of its own behind a plain C interface, so that edgefl
 * builds and runs without CUDA; edgefl/kernels/backend_cuda.py loads it.
 *
 * Elements have the reference's bits: __fmul_rn and __fadd_rn round every product and every sum and are never
 * fused, updates are taken in ascending order, denormals count (no -ftz). Norms are summed in double in an
 * order of their own, fixed by the grid: the same bits from run to run, within 1e-12 of the reference's.
 * edgefl/kernels/cuda_library.py has the command that builds it. */
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <mutex>
#include <vector>

#include "edgefl_kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int THREADS = 256, WARPS = THREADS / 32, QUAD = 4;
constexpr int QUADS = 16;                     /* groups of four elements for each thread of a tile */
constexpr int TILE = THREADS * QUAD * QUADS;  /* elements for a block of threads: more than a tile of the CPU's */
constexpr int64_t CHUNK = 64 * TILE;          /* elements copied at once from the host */
constexpr int STREAMS = 2;

struct quad {
    float x[QUAD], scale; /* the scale and the sum of the integers' squares: int8 only */
    int squares;
};
struct words {
    uint64_t sum, weighted;
};
enum { NO_STEP = EF_OPTIMIZERS };

/* Four elements from i on, as floats; the bytes of those past n are zeros. Adds their words to `w`. */
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
    /* Indices that are known when this is compiled keep arrays in registers: hence the unrolling. */
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

/* sums += weight * update over this block's tile; partial: this warp's share of the squared norm. */
template <int DTYPE, bool SUMS>
__device__ __forceinline__ void take(quad (&total)[QUADS], const ef_update &u, int64_t start, int64_t n, int64_t first,
                                     double *partial, words *sums)
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
            if (DTYPE != EF_I8) norm = __fma_rn((double)q.x[j], (double)q.x[j], norm); /* exact products */
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

/* One element of a step: see ef_step. */
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

/* One block a tile: its sum stays in registers while the updates pass, each with QUADS wide loads in flight.
 * `first` is the place of this part in the whole; partial is tiles x count x WARPS, sums is count. */
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
        case EF_F16: take<EF_F16, SUMS>(total, u[k], start, n, first, share, w); break;
        case EF_BF16: take<EF_BF16, SUMS>(total, u[k], start, n, first, share, w); break;
        case EF_I8: take<EF_I8, SUMS>(total, u[k], start, n, first, share, w); break;
        default: take<EF_F32, SUMS>(total, u[k], start, n, first, share, w);
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

/* norms[k] = the sum of all tiles' warps' shares, in an order that depends on their number alone. */
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
    if (sums) sum_tiles<KIND, true><<<tiles, THREADS, 0, stream>>>(out, base, u, count, n, first, partial, sums, s);
    else sum_tiles<KIND, false><<<tiles, THREADS, 0, stream>>>(out, base, u, count, n, first, partial, sums, s);
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

/* ---- host side ---- */

thread_local char message[200];

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const cudaError_t error = (call);                                                                    \
        if (error != cudaSuccess) {                                                                          \
            snprintf(message, sizeof message, "%s: %s", #call, cudaGetErrorString(error));                   \
            return -1;                                                                                       \
        }                                                                                                    \
    } while (0)

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Device memory that grows and is kept from call to call; one call at a time. */
struct arena {
    char *memory = nullptr;
    size_t size = 0, used = 0;
    int reserve(size_t bytes)
    {
        used = 0;
        if (bytes <= size) return 0;
        if (memory) cudaFree(memory);
        memory = nullptr, size = 0;
        TRY(cudaMalloc(&memory, bytes));
        size = bytes;
        return 0;
    }
    void *take(size_t bytes)
    {
        void *p = memory + used;
        used += padded(bytes);
        return p;
    }
};
std::mutex in_use;
arena device;
cudaStream_t streams[STREAMS];

int make_streams()
{
    for (auto &stream : streams)
        if (!stream) TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 0;
}

int64_t size_of(int dtype) { return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2; }
int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }
int64_t blocks_of(int64_t n) { return (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK; }

/* What every call needs on the device besides vectors. */
struct results {
    double *partial, *norms;
    words *sums;
};

int finish(const results &r, int64_t count, int64_t n, double *norms, uint64_t *sums, cudaStream_t stream)
{
    if (count) add_norms<<<(unsigned)count, THREADS, 0, stream>>>(r.partial, tiles_of(n), count, r.norms);
    TRY(cudaGetLastError());
    TRY(cudaMemcpyAsync(norms, r.norms, count * sizeof(double), cudaMemcpyDeviceToHost, stream));
    if (sums) TRY(cudaMemcpyAsync(sums, r.sums, count * sizeof(words), cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    return 0;
}

size_t results_bytes(int64_t count, int64_t n)
{
    return padded(tiles_of(n) * count * WARPS * 8) + padded(count * 8) + padded(count * sizeof(words));
}

results make_results(int64_t count, int64_t n)
{
    return {(double *)device.take(tiles_of(n) * count * WARPS * 8), (double *)device.take(count * 8),
            (words *)device.take(count * sizeof(words))};
}

} // namespace
EXPORT int efc_abi(void) { return EF_ABI; }
EXPORT const char *efc_error(void) { return message; }
/* Devices that can be used; -1 with a reason in efc_error. */
EXPORT int efc_devices(void)
{
    int count = 0;
    TRY(cudaGetDeviceCount(&count));
    return count;
}

/* Page-locks host memory (the parameter buffer, once), so that copies overlap the sum. */
EXPORT int efc_register(void *memory, int64_t bytes)
{
    TRY(cudaHostRegister(memory, (size_t)bytes, cudaHostRegisterPortable));
    return 0;
}
EXPORT int efc_unregister(void *memory)
{
    TRY(cudaHostUnregister(memory));
    return 0;
}

/* On device memory whose vectors are aligned to 16 bytes. norms: count; sums: count pairs, or NULL; both in
 * host memory, and so is u, whose pointers are the device's. */
EXPORT int efc_sum_device(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, double *norms,
                          uint64_t *sums, const ef_step *step)
{
    const std::lock_guard<std::mutex> guard(in_use);
    if (make_streams() || device.reserve(results_bytes(count, n) + padded(count * sizeof *u))) return -1;
    const cudaStream_t stream = streams[0];
    const results r = make_results(count, n);
    auto list = (ef_update *)device.take(count * sizeof *u);
    TRY(cudaMemcpyAsync(list, u, count * sizeof *u, cudaMemcpyHostToDevice, stream));
    if (sums) TRY(cudaMemsetAsync(r.sums, 0, count * sizeof(words), stream));
    if (n) sum_part(out, base, list, count, n, 0, r.partial, sums ? r.sums : nullptr, step, stream);
    return finish(r, count, n, norms, sums, stream);
}

/* On host memory, at any alignment: chunk by chunk, two streams taking turns. */
EXPORT int efc_sum_host(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, double *norms,
                        uint64_t *sums, const ef_step *step)
{
    const std::lock_guard<std::mutex> guard(in_use);
    const int64_t most = n < CHUNK ? n : CHUNK;
    const int state = !step ? 0 : step->kind == EF_MOMENTUM ? 1 : 2;
    size_t lane = padded(most * 4) * (2 + 2 * state) + padded(count * sizeof *u);
    for (int64_t k = 0; k < count; k++) lane += padded(most * size_of(u[k].dtype)) + padded(blocks_of(most) * 4);
    if (make_streams() || device.reserve(results_bytes(count, n) + STREAMS * lane)) return -1;
    const results r = make_results(count, n);
    TRY(cudaMemsetAsync(r.sums, 0, count * sizeof(words), streams[0]));
    TRY(cudaStreamSynchronize(streams[0]));
    const size_t shared = device.used;
    std::vector<ef_update> list(STREAMS * count);
    for (int64_t first = 0, turn = 0; first < n; first += CHUNK, turn++) {
        const int64_t m = n - first < CHUNK ? n - first : CHUNK;
        const cudaStream_t stream = streams[turn % STREAMS];
        ef_update *mine = list.data() + turn % STREAMS * count;
        TRY(cudaStreamSynchronize(stream)); /* its list and its buffers are about to be used again */
        device.used = shared + turn % STREAMS * lane;
#define TO(name, source, bytes)                                                                              \
    void *name = device.take(bytes);                                                                         \
    TRY(cudaMemcpyAsync(name, source, bytes, cudaMemcpyHostToDevice, stream))
        float *total = (float *)device.take(m * 4);
        const float *model = step ? step->base : base;
        ef_step s = step ? *step : ef_step{};
        void *from = device.take(m * 4);
        if (model) TRY(cudaMemcpyAsync(from, model + first, m * 4, cudaMemcpyHostToDevice, stream));
        if (step) {
            TO(old_a, step->old_a + first, m * 4);
            s.base = (float *)from, s.out = total, s.old_a = (float *)old_a, s.new_a = (float *)device.take(m * 4);
            if (state == 2) {
                TO(old_b, step->old_b + first, m * 4);
                s.old_b = (float *)old_b, s.new_b = (float *)device.take(m * 4);
            }
        }
        for (int64_t k = 0; k < count; k++) {
            const int64_t size = size_of(u[k].dtype);
            TO(vector, (const char *)u[k].data + first * size, m * size);
            mine[k] = u[k];
            mine[k].data = vector;
            if (u[k].dtype != EF_I8) continue;
            TO(scales, u[k].scales + first / EF_SCALE_BLOCK, blocks_of(m) * 4);
            mine[k].scales = (const ef_loose_float *)scales;
        }
        TO(sent, mine, count * sizeof *mine);
#undef TO
        double *partial = r.partial + first / TILE * count * WARPS;
        sum_part(total, step || !base ? nullptr : (const float *)from, (const ef_update *)sent, count, m, first, partial,
                 sums ? r.sums : nullptr, step ? &s : nullptr, stream);
        TRY(cudaGetLastError());
        float *const made[] = {step ? step->out : out, step ? step->new_a : nullptr, state == 2 ? step->new_b : nullptr};
        float *const from_device[] = {total, s.new_a, s.new_b};
        for (int v = 0; v <= state; v++)
            TRY(cudaMemcpyAsync(made[v] + first, from_device[v], m * 4, cudaMemcpyDeviceToHost, stream));
    }
    for (auto stream : streams) TRY(cudaStreamSynchronize(stream));
    return finish(r, count, n, norms, sums, streams[0]);
}
