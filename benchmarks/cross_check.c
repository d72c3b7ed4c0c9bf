/* Reads test cases from stdin, runs the kernels on them, and writes the results to stdout. cross_check.py builds this
 * program for another type of processor. A case consists of kind, dtype, n and count (each int64) and of its arrays. */
#include "edgefl_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *take(int64_t bytes)
{
    char *p = malloc((size_t)bytes + 1);
    if (!p || fread(p, 1, (size_t)bytes, stdin) != (size_t)bytes) exit(1);
    return p;
}

static void give(const void *p, int64_t bytes)
{
    if (fwrite(p, 1, (size_t)bytes, stdout) != (size_t)bytes) exit(1);
}

int main(void)
{
    static const int64_t size_of[] = {4, 2, 2, 1};
    int64_t head[4];
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const int dtype = (int)head[1];
        const int64_t n = head[2], count = head[3], size = size_of[dtype];
        const int64_t scales = dtype == EF_I8 ? (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK * 4 : 0;
        if (head[0] == 0) { /* base, weights, updates (each followed by its scales) -> out, norms, checksums */
            float *base = take(n * 4), *weights = take(count * 4), *out = malloc((size_t)n * 4 + 1);
            double *norms = malloc((size_t)count * 8 + 1);
            uint64_t *sums = malloc((size_t)count * 8 + 1);
            ef_update *u = malloc((size_t)count * sizeof *u + 1);
            for (int64_t k = 0; k < count; k++) {
                void *data = take(n * size);
                u[k] = (ef_update){data, take(scales), weights[k], dtype};
            }
            if (ef_weighted_sum(out, base, u, count, n, norms, sums, NULL, 2)) return 1;
            give(out, n * 4), give(norms, count * 8), give(sums, count * 8);
            for (int64_t k = 0; k < count; k++) free((void *)u[k].data), free((void *)u[k].scales);
            free(base), free(weights), free(out), free(norms), free(sums), free(u);
        } else if (head[0] == 2) { /* trained, base -> out and 1 if its checksum is right, for each kind of store */
            float *trained = take(n * 4), *base = take(n * 4), *out = aligned_alloc(64, (size_t)(n * 4 + 127) / 64 * 64);
            if (!out) return 1;
            for (int around = 0; around < 2; around++) {
                uint64_t s[2] = {0, 0};
                memset(out, 0xff, (size_t)n * 4);
                ef_isa_now()->delta(out, trained, base, n, around, s);
                const unsigned char *bytes = (const unsigned char *)out;
                const int64_t alike = ef_folded(s, bytes, 4 * n) == ef_checksum(bytes, 4 * n, 2);
                give(out, n * 4), give(&alike, 8);
            }
            free(trained), free(base), free(out);
        } else { /* x -> out, scales, left, norm */
            double norm;
            ef_quantization q = {take(n * 4), NULL, 1.0f, dtype, malloc((size_t)(n * size) + 1),
                                 malloc((size_t)scales + 1), malloc((size_t)n * 4 + 1)};
            if (ef_quantize(&q, n, 2, &norm)) return 1;
            give(q.out, n * size), give(q.scales, scales), give(q.left, n * 4), give(&norm, 8);
            free((void *)q.x), free(q.out), free(q.scales), free(q.left);
        }
    }
    ef_pool_close();
    return 0;
}
