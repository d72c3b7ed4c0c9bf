/* Weighted sums whose bits do not depend on the order of the updates, nor on how they were shared out: each
 * product is rounded to a multiple of 2^-40, and sums of such numbers are exact in a double below 2^13. */
#include "binding.h"
#include "fp_state.h"

#include <stdlib.h>

#define GRID 6144.0 /* 1.5 * 2^12: for |y| < 2^11, (y + GRID) - GRID is the nearest multiple of 2^-40 */

#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

typedef struct {
    const ef_isa *isa;
    double *out;
    const ef_update *u; /* of weight 1 */
    const double *weights;
    int64_t count, n;
    double *norms;  /* tiles x count */
    uint64_t *sums; /* tiles x count x 2 */
} exact_job;

CLONES static void add(double *out, const float *x, double weight, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] += (weight * (double)x[i] + GRID) - GRID;
}

typedef float loose_float __attribute__((aligned(1)));

/* Four updates of float32, read where they lie: any order of such sums has the same bits. */
CLONES static void add_four(double *out, const loose_float *const x[4], const double *weights, int64_t n)
{
    const loose_float *a = x[0], *b = x[1], *c = x[2], *d = x[3];
    const double v = weights[0], w = weights[1], y = weights[2], z = weights[3];
    for (int64_t i = 0; i < n; i++)
        out[i] += ((v * (double)a[i] + GRID) - GRID) + ((w * (double)b[i] + GRID) - GRID) +
                  ((y * (double)c[i] + GRID) - GRID) + ((z * (double)d[i] + GRID) - GRID);
}

static int four_floats(const exact_job *job, int64_t j)
{
    if (j + 4 > job->count) return 0;
    for (int64_t k = j; k < j + 4; k++)
        if (job->u[k].dtype != EF_F32) return 0;
    return 1;
}

static void exact_grain(void *context, int64_t grain)
{
    const exact_job *job = context;
    const fp_state fp = fp_enter();
    const float zeros[EF_TILE] __attribute__((aligned(64))) = {0};
    float x[EF_TILE] __attribute__((aligned(64)));
    for (int64_t t = grain * EF_GRAIN; t < (grain + 1) * EF_GRAIN && t * EF_TILE < job->n; t++) {
        const int64_t at = t * EF_TILE, n = job->n - at < EF_TILE ? job->n - at : EF_TILE;
        for (int64_t j = 0, members; j < job->count; j += members) {
            const ef_update *u = job->u + j;
            const int64_t size = u->dtype == EF_F32 ? 4 : u->dtype == EF_I8 ? 1 : 2, place = t * job->count + j;
            members = four_floats(job, j) ? 4 : 1;
            /* A sum of weight 1: the norms, and of one update alone itself as float32. */
            job->isa->group[u->dtype]((int)members, &(ef_group){u, at, n, zeros, x, job->norms + place, 1, 0, 0});
            const loose_float *its[4] = {0};
            for (int k = 0; k < members; k++) {
                const unsigned char *p = (const unsigned char *)u[k].data + at * size;
                job->isa->words(p, n * size / 4, job->sums + 2 * (place + k));
                its[k] = (const loose_float *)p;
            }
            if (members == 4) add_four(job->out + at, its, job->weights + j, n);
            else add(job->out + at, x, job->weights[j], n);
        }
    }
    fp_leave(fp);
}

static int exact_sum(double *out, const ef_update *u, const double *weights, int64_t count, int64_t n, double *norms,
                     uint64_t *checksums, int threads)
{
    const int64_t tiles = (n + EF_TILE - 1) / EF_TILE;
    double *partial = calloc((size_t)(tiles * count + 1), 3 * sizeof *partial);
    if (!partial) return -1;
    exact_job job = {ef_isa_now(), out, u, weights, count, n, partial, (uint64_t *)(partial + tiles * count)};
    ef_pool_run(exact_grain, &job, (tiles + EF_GRAIN - 1) / EF_GRAIN, threads);
    for (int64_t j = 0; j < count; j++) {
        const int64_t size = u[j].dtype == EF_F32 ? 4 : u[j].dtype == EF_I8 ? 1 : 2;
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
