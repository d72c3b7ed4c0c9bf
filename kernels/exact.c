/* Weighted sums whose bits do not depend on the order of the updates, nor on how they were shared out.
 *
 * While it is made, a sum, which was a multiple of 2^-40 before, has BIAS on top, which keeps it in [2^12, 2^13),
 * where doubles are the multiples of 2^-40.
 * So each fused multiply-add adds the multiple of 2^-40 that is nearest to its product, whatever the sum is: but for
 * a product half-way between two, which would go to the even sum. There is none, because the last bit of a weight's
 * fraction is 1 (edgefl/kernels/exact.py sets it). With 2^e <= |w| < 2^(e+1), and x an odd multiple of 2^f, w*x is an
 * odd multiple of 2^(e-52+f); half-way means e-52+f = -41, and then |w*x| >= 2^(e+f) = 2^11, more than may be. (And
 * with a denormal w, of 2^(f-1074): f is less than 128.) */
#include "binding.h"
#include "fp_state.h"

#include <stdlib.h>

#define BIAS 6144.0 /* the middle of [2^12, 2^13) */

typedef struct {
    const ef_isa *isa;
    double *out;
    const ef_update *u; /* of weight 1 */
    const double *weights;
    int64_t count, n;
    double *norms;  /* tiles x count */
    uint64_t *sums; /* tiles x count x 2 */
} exact_job;

/* The updates from u[0] that are added in one pass: of float32 as they lie, another type alone. */
static int members(const ef_update *u, int64_t left)
{
    int count = 0;
    while (count < EF_GROUP && count < left && u[count].dtype == EF_F32) count++;
    return count ? count : 1;
}

static void exact_tile(const exact_job *job, int64_t t)
{
    static const float zeros[EF_TILE] __attribute__((aligned(64))) = {0};
    const int64_t at = t * EF_TILE, n = job->n - at < EF_TILE ? job->n - at : EF_TILE;
    double *out = job->out + at;
    for (int64_t i = 0; i < n; i++) out[i] += BIAS;
    for (int64_t j = 0, together; j < job->count; j += together) {
        const ef_update *u = job->u + j;
        const int64_t place = t * job->count + j, size = ef_size(u->dtype);
        float x[EF_TILE] __attribute__((aligned(64)));
        double norms[EF_GROUP];
        ef_exact some = {{0}, job->weights + j, out, job->norms + place, n};
        together = members(u, job->count - j);
        if (u->dtype == EF_F32) {
            for (int k = 0; k < together; k++) some.u[k] = (const ef_loose_float *)u[k].data + at;
        } else { /* decoded by a sum of weight 1, which has the norm */
            job->isa->group[u->dtype](1, &(ef_group){u, at, n, zeros, x, job->norms + place, 1, 0, 0});
            some.u[0] = x, some.norms = norms;
        }
        job->isa->exact(together, &some);
        for (int k = 0; k < together; k++)
            job->isa->words((const unsigned char *)u[k].data + at * size, n * size / 4,
                            job->sums + 2 * (place + k));
    }
    for (int64_t i = 0; i < n; i++) out[i] -= BIAS;
}

static void exact_grain(void *context, int64_t grain)
{
    const exact_job *job = context;
    const fp_state fp = fp_enter();
    for (int64_t t = grain * EF_GRAIN; t < (grain + 1) * EF_GRAIN && t * EF_TILE < job->n; t++) exact_tile(job, t);
    fp_leave(fp);
}

static int exact_sum(double *out, const ef_update *u, const double *weights, int64_t count, int64_t n, double *norms,
                     uint64_t *checksums, int threads)
{
    const int64_t tiles = (n + EF_TILE - 1) / EF_TILE;
    if (!count) return 0;
    double *partial = calloc((size_t)(tiles * count + 1), 3 * sizeof *partial);
    if (!partial) return -1;
    exact_job job = {ef_isa_now(), out, u, weights, count, n, partial, (uint64_t *)(partial + tiles * count)};
    ef_pool_run(exact_grain, &job, (tiles + EF_GRAIN - 1) / EF_GRAIN, threads);
    for (int64_t j = 0; j < count; j++) {
        const int64_t size = ef_size(u[j].dtype);
        uint64_t s[2] = {0, 0};
        norms[j] = 0;
        for (int64_t t = 0; t < tiles; t++) {
            const uint64_t *part = job.sums + 2 * (t * count + j);
            norms[j] += partial[t * count + j];
            s[0] += part[0];
            s[1] += part[1] + (uint64_t)(t * (EF_TILE / 4 * size)) * part[0];
        }
        checksums[j] = ef_folded(s, u[j].data, n * size);
    }
    free(partial);
    return 0;
}

/* exact_sum(out, updates, weights, scales, norms, checksums, threads) -> True, or None: see module.c. Updates and
 * scales are lists; weights, norms and checksums flat arrays of as many float64, float64 and uint64. */
PyObject *ef_py_exact_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer fixed[4] = {{0}}, *views = NULL;
    ef_update *u = NULL;
    PyObject *result = NULL;
    Py_ssize_t count;
    int64_t bytes;
    int failed = 0;
    long threads;
    (void)self;
    if (nargs != 7) return PyErr_Format(PyExc_TypeError, "exact_sum takes 7 arguments (got %zd)", nargs);
    threads = PyLong_AsLong(args[6]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if ((count = PyList_Size(args[1])) < 0 || PyList_Size(args[3]) != count) goto done;
    views = PyMem_Calloc((size_t)(2 * count + 1), sizeof *views);
    u = PyMem_Calloc((size_t)(count + 1), sizeof *u);
    if (!views || !u) {
        failed = 1;
        goto done;
    }
    for (int i = 0; i < 4; i++) {
        static const int where[] = {0, 2, 4, 5};
        if (!flat(args[where[i]], &fixed[i], i != 1)) goto done;
        if (i < 3 ? !is_format(&fixed[i], 'd', 8) : !is_uint64(&fixed[i])) goto done;
        if (i && fixed[i].len != count * 8) goto done;
    }
    bytes = fixed[0].len;
    for (Py_ssize_t j = 0; j < count; j++) {
        PyObject *update = PyList_GetItem(args[1], j), *scale = PyList_GetItem(args[3], j);
        u[j].weight = 1.0f;
        if (!update_of(update, scale, fixed[0].len / 8, &u[j], &views[2 * j], &views[2 * j + 1])) goto done;
        if (overlap(&fixed[0], &views[2 * j]) || overlap(&fixed[0], &views[2 * j + 1])) goto done;
        bytes += views[2 * j].len;
    }
    Py_BEGIN_ALLOW_THREADS
    failed = exact_sum(fixed[0].buf, u, fixed[1].buf, count, fixed[0].len / 8, fixed[2].buf, fixed[3].buf,
                       share(bytes, threads));
    Py_END_ALLOW_THREADS
    if (!failed) result = Py_NewRef(Py_True);
done:
    if (views) release(views, 2 * count);
    release(fixed, 4);
    PyMem_Free(views);
    PyMem_Free(u);
    if (failed) return PyErr_NoMemory();
    PyErr_Clear();
    return result ? result : Py_NewRef(Py_None);
}
