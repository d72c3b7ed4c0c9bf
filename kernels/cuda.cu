/* The CUDA back end: sums, steps and masks of vectors in host memory. A pipeline copies one chunk to the GPU while it
 * sums another. The back end is a separate shared library with a C interface, which edgefl/kernels/backend_cuda.py
 * loads, so that edgefl can be built and run without CUDA.
 *
 * This file is the host code; cuda_kernels.cuh is the device code. edgefl/kernels/cuda_library.py builds both. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda_kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
#ifndef EF_CHUNK_BYTES
#define EF_CHUNK_BYTES (4 << 20) /* bytes of an update per copy from the host, enough to amortise the copy's latency */
#endif
constexpr int64_t CHUNK_BYTES = EF_CHUNK_BYTES;
constexpr int64_t MOST = 128; /* with more vectors than this, chunks are smaller, so that all of them fit into memory */
constexpr int STREAMS = 2;

thread_local char message[200];

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const cudaError_t error = (call);                                                                    \
        if (error != cudaSuccess) {                                                                          \
            snprintf(message, sizeof message, "%s: %s", #call, cudaGetErrorString(error));                   \
            (void)cudaGetLastError(); /* otherwise the next call's first launch would return this error */   \
            return -1;                                                                                       \
        }                                                                                                    \
    } while (0)

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Device memory that grows on demand and is reused by later calls. It is not thread-safe, so functions lock `in_use`
 * before they use it. */
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
    void *allocate(size_t bytes)
    {
        void *p = memory + used;
        used += padded(bytes);
        return p;
    }
};
std::mutex in_use;
arena device;
cudaStream_t streams[STREAMS];

/* Allocate device memory `name`, and copy host memory to it in `stream`. */
#define TO(name, source, bytes)                                                                                \
    void *name = device.allocate(bytes);                                                                         \
    TRY(cudaMemcpyAsync(name, source, bytes, cudaMemcpyHostToDevice, stream))

int make_streams()
{
    for (auto &stream : streams)
        if (!stream) TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 0;
}

int64_t size_of(int dtype) { return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2; }
int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }
static_assert(CHUNK_BYTES / 4 % TILE == 0 && TILE % EF_SCALE_BLOCK == 0, "chunks hold whole tiles and scale blocks");
int64_t blocks_of(int64_t n) { return (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK; }

/* Device memory for the norms and checksums that a call computes. */
struct results {
    double *partial, *norms;
    words *sums;
};

int finish(const results &r, int64_t count, int64_t n, double *norms, uint64_t *sums, cudaStream_t stream)
{
    if (count) LAUNCH(add_norms, (unsigned)count, stream, r.partial, tiles_of(n), count, r.norms);
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
    return {(double *)device.allocate(tiles_of(n) * count * WARPS * 8), (double *)device.allocate(count * 8),
            (words *)device.allocate(count * sizeof(words))};
}

} // namespace
EXPORT int efc_abi(void) { return EF_ABI; }
EXPORT const char *efc_error(void) { return message; }
/* Return the number of usable GPUs, or -1 on failure; efc_error then returns the reason. */
EXPORT int efc_devices(void)
{
    int count = 0;
    TRY(cudaGetDeviceCount(&count));
    return count;
}

/* Page-lock host memory, so that copies from it overlap with the sum. This is done once for the parameter buffer. */
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

/* Sum vectors in host memory, at any alignment, chunk by chunk in two alternating streams. If `step` is not NULL, apply
 * the step to the sum. */
EXPORT int efc_sum_host(float *out, const float *base, const ef_update *u, int64_t count, int64_t n, double *norms,
                        uint64_t *sums, const ef_step *step)
{
    const std::lock_guard<std::mutex> guard(in_use);
    int64_t widest = count ? 1 : 4;
    for (int64_t k = 0; k < count; k++) widest = std::max(widest, size_of(u[k].dtype));
    const int64_t chunk = std::max<int64_t>(TILE, CHUNK_BYTES / widest * MOST / std::max(count, MOST) / TILE * TILE);
    const int64_t most = std::min(n, chunk);
    const int state = !step ? 0 : step->kind == EF_MOMENTUM ? 1 : 2;
    size_t lane = padded(most * 4) * (2 + 2 * state) + padded(count * sizeof *u);
    for (int64_t k = 0; k < count; k++) lane += padded(most * size_of(u[k].dtype)) + padded(blocks_of(most) * 4);
    if (make_streams() || device.reserve(results_bytes(count, n) + STREAMS * lane)) return -1;
    const results r = make_results(count, n);
    TRY(cudaMemsetAsync(r.sums, 0, count * sizeof(words), streams[0]));
    TRY(cudaStreamSynchronize(streams[0]));
    const size_t shared = device.used;
    std::vector<ef_update> list(STREAMS * count);
    for (int64_t first = 0, turn = 0; first < n; first += chunk, turn++) {
        const int64_t m = std::min(n - first, chunk);
        const cudaStream_t stream = streams[turn % STREAMS];
        ef_update *mine = list.data() + turn % STREAMS * count;
        TRY(cudaStreamSynchronize(stream)); /* wait, because the list and the buffers of the stream are reused now */
        device.used = shared + turn % STREAMS * lane;
        float *total = (float *)device.allocate(m * 4);
        const float *model = step ? step->base : base;
        ef_step s = step ? *step : ef_step{};
        void *from = device.allocate(m * 4);
        if (model) TRY(cudaMemcpyAsync(from, model + first, m * 4, cudaMemcpyHostToDevice, stream));
        if (step) {
            TO(old_a, step->old_a + first, m * 4);
            s.base = (float *)from, s.out = total, s.old_a = (float *)old_a, s.new_a = (float *)device.allocate(m * 4);
            if (state == 2) {
                TO(old_b, step->old_b + first, m * 4);
                s.old_b = (float *)old_b, s.new_b = (float *)device.allocate(m * 4);
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

/* Compute a weighted sum modulo EF_PRIME (see ef_field_sum). Each weight must be below EF_PRIME. */
EXPORT int efc_field_sum(uint32_t *out, const uint32_t *const *v, const uint64_t *w, int64_t count, int64_t n)
{
    const std::lock_guard<std::mutex> guard(in_use);
    constexpr int64_t FULL = CHUNK_BYTES / 4;
    static_assert(FULL % FIELD_TILE == 0, "chunks hold whole tiles");
    const int64_t chunk = std::max<int64_t>(FIELD_TILE, FULL * MOST / std::max(count, MOST) / FIELD_TILE * FIELD_TILE);
    const size_t lane = padded(std::min(n, chunk) * 4) * (count + 1) + 2 * padded(count * 8);
    if (make_streams() || device.reserve(STREAMS * lane)) return -1;
    std::vector<void *> list(STREAMS * count);
    for (int64_t first = 0, turn = 0; first < n; first += chunk, turn++) {
        const int64_t m = std::min(n - first, chunk);
        const cudaStream_t stream = streams[turn % STREAMS];
        void **mine = list.data() + turn % STREAMS * count;
        TRY(cudaStreamSynchronize(stream)); /* wait, because the list and the buffers of the stream are reused now */
        device.used = turn % STREAMS * lane;
        uint32_t *total = (uint32_t *)device.allocate(m * 4);
        for (int64_t k = 0; k < count; k++) {
            TO(vector, v[k] + first, m * 4);
            mine[k] = vector;
        }
        TO(vectors, mine, count * 8);
        TO(weights, w, count * 8);
        LAUNCH(field_tiles, (unsigned)((m + FIELD_TILE - 1) / FIELD_TILE), stream, total, (const uint32_t *const *)vectors,
               (const uint64_t *)weights, count, m);
        TRY(cudaGetLastError());
        TRY(cudaMemcpyAsync(out + first, total, m * 4, cudaMemcpyDeviceToHost, stream));
    }
    for (auto stream : streams) TRY(cudaStreamSynchronize(stream));
    return 0;
}

/* Encode `floats` to `words` if `encodes` is 1, otherwise decode `words` to `floats` (see ef_field_code). Set *result
 * to the number of clipped elements or to the largest magnitude. */
EXPORT int efc_field_code(int encodes, float *floats, uint32_t *words, const uint32_t *mask, int64_t n, float clip,
                          float factor, uint32_t *result)
{
    const std::lock_guard<std::mutex> guard(in_use);
    constexpr int64_t CHUNK = CHUNK_BYTES / 4;
    const size_t part = padded(std::min(n, CHUNK) * 4), shared = padded(sizeof *result);
    if (make_streams() || device.reserve(shared + STREAMS * 3 * part)) return -1;
    unsigned *found = (unsigned *)device.allocate(sizeof *result);
    TRY(cudaMemsetAsync(found, 0, sizeof *result, streams[0]));
    TRY(cudaStreamSynchronize(streams[0]));
    for (int64_t first = 0, turn = 0; first < n; first += CHUNK, turn++) {
        const int64_t m = std::min(n - first, CHUNK);
        const cudaStream_t stream = streams[turn % STREAMS];
        const unsigned blocks = (unsigned)((m + THREADS - 1) / THREADS);
        device.used = shared + turn % STREAMS * 3 * part;
        TO(from, encodes ? (const void *)(floats + first) : words + first, m * 4);
        TO(masks, mask + first, m * 4);
        void *made = device.allocate(m * 4);
        if (encodes)
            LAUNCH(encode_field, blocks, stream, (const float *)from, (uint32_t *)made, (const uint32_t *)masks, m, clip,
                   factor, found);
        else
            LAUNCH(decode_field, blocks, stream, (float *)made, (const uint32_t *)from, (const uint32_t *)masks, m, factor,
                   found);
        TRY(cudaGetLastError());
        TRY(cudaMemcpyAsync(encodes ? (void *)(words + first) : floats + first, made, m * 4, cudaMemcpyDeviceToHost, stream));
    }
    for (auto stream : streams) TRY(cudaStreamSynchronize(stream));
    TRY(cudaMemcpyAsync(result, found, sizeof *result, cudaMemcpyDeviceToHost, streams[0]));
    TRY(cudaStreamSynchronize(streams[0]));
    return 0;
}
