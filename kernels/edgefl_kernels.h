/* Common declarations of the native kernels: block sizes, element types, and the functions that the Python binding
 * (module.c) calls. Block sizes fix the order of partial sums, so changing them changes results. */
#ifndef EDGEFL_KERNELS_H
#define EDGEFL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Increase whenever a function's arguments or a block size changes; must equal ABI in edgefl/kernels/selection.py. */
#define EF_ABI 8

#define EF_TILE 2048       /* elements per tile, whose partial sum stays in the L1 cache; the block of norms */
#define EF_STREAM_BYTES (1 << 20) /* minimum output bytes for non-temporal stores */
#define EF_SPAN 8          /* maximum tiles per pass over a group of updates */
#define EF_LANES 8         /* interleaved double accumulators per tile */
#define EF_SCALE_BLOCK 256 /* int8 elements per float32 scale */
#define EF_GROUP 6         /* maximum updates read in one pass over a tile */
#define EF_GRAIN 16        /* tiles per unit of work of a thread */

/* Types without alignment requirements. */
typedef float ef_loose_float __attribute__((aligned(1)));
typedef uint16_t ef_loose_uint16 __attribute__((aligned(1)));
typedef uint32_t ef_loose_uint32 __attribute__((aligned(1)));

enum ef_dtype { EF_F32, EF_F16, EF_BF16, EF_I8 };
/* Bytes per element. */
static inline __attribute__((always_inline)) int64_t ef_size(int dtype)
{
    return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2;
}

typedef struct {
    const void *data;
    const ef_loose_float *scales; /* int8 only: one per EF_SCALE_BLOCK elements */
    float weight;
    int dtype;
} ef_update;

/* A server optimiser's step from the sum g, computed while g is in the cache; edgefl/kernels/steps.py has the same
 * equations. Old vectors are only read and new ones only written, so an interrupted step can be repeated.
 *
 *   EF_MOMENTUM   a = keep1*a + g;           out = base + lr*a
 *   the others    a = keep1*a + add1*g;      out = base + lr*a / (sqrt(b) + epsilon)
 *   EF_ADAGRAD    b = b + g^2
 *   EF_ADAM       b = keep2*b + add2*g^2
 *   EF_YOGI       b = b - add2*(g^2 * sign(b - g^2)) */
enum ef_optimizer { EF_MOMENTUM, EF_ADAM, EF_YOGI, EF_ADAGRAD, EF_OPTIMIZERS };
typedef struct {
    int kind;
    float keep1, add1, keep2, add2, epsilon, lr;
    float *out, *new_a, *new_b; /* new_b and old_b only if the kind has b; outputs overlap nothing */
    const float *base, *old_a, *old_b;
} ef_step;

/* Quantisation of a float32 vector x: y = weight*x + residual, rounded to out's type. */
typedef struct {
    const ef_loose_float *x, *residual; /* residual may be NULL */
    float weight;
    int dtype;
    void *out;
    ef_loose_float *scales; /* output, int8 only */
    ef_loose_float *left;   /* output: y - decoded(out), or 0 where it is not finite; may be NULL or residual */
    /* out may be x (float32), and x and residual may overlap; outputs overlap nothing else. */
} ef_quantization;

/* A group of updates of one type, added in one pass over n elements from element `at` on:
 * to[i] = from[i] + sum_j weight_j * update_j[at + i], and norms[j + t * stride] = the squared norm of tile t of
 * update j.
 *
 * 0 < n <= EF_SPAN * EF_TILE, and `at` is a multiple of EF_TILE. Arrays may be unaligned; with `stream`, `to` must
 * be aligned to 64 bytes. `to` may be `from` and overlaps nothing else. */
typedef struct {
    const ef_update *u;
    int64_t at, n;
    const float *from;
    float *to;
    double *norms;
    int64_t stride;
    int stream; /* use non-temporal stores */
    int fresh;  /* `from` is not in the cache yet */
} ef_group;

/* Updates of n elements that are read element by element: means of ranks trim <= r < count - trim of each element, and
 * inner products. */
#define EF_MOST_ORDERED 1024 /* maximum updates */
typedef struct {
    float *out;
    const ef_update *u;
    int64_t count, n, trim;
    const int32_t *network; /* pairs (i, j): the smaller of elements i and j goes to i; they sort ranks trim and up */
    int64_t pairs;
} ef_order;
/* Elements of each update per pass, a multiple of 32: all together fill about 32 KiB. */
static inline int64_t ef_order_width(int64_t count) { return count < 128 ? 8192 / count / 32 * 32 : 64; }

/* Arithmetic modulo the prime EF_PRIME, of secure aggregation; all numbers are below it. */
#define EF_PRIME 4294967291u /* 2^32 - 5 */
enum { EF_MOST_FIELD = 65536 }; /* maximum vectors of a sum */
typedef struct {
    ef_loose_uint32 *out; /* overlaps no vector */
    const ef_loose_uint32 *const *v;
    const uint64_t *w;
    int64_t count, n;
    int exact; /* the sum of the weights is at most 2^32, so that 64 bits hold the sum */
} ef_field_sum;
/* Encoding reads floats and writes words; decoding reads words and writes floats. mask may be words. */
typedef struct {
    ef_loose_float *floats;
    ef_loose_uint32 *words;
    const ef_loose_uint32 *mask;
    int64_t n;
    float clip, factor; /* clip is used by encoding only */
} ef_field_code;

/* The functions for one instruction set. Offsets and counts are in elements. Arrays may be unaligned and must not
 * overlap, with the exceptions below. All functions run in the floating-point state of fp_state.h. */
typedef struct {
    const char *name;
    void (*group[4])(int count, const ef_group *g); /* for each ef_dtype, 1 <= count <= EF_GROUP */
    unsigned char most[4];                          /* for each ef_dtype, the largest group that fits registers */
    /* Apply step s to elements at <= i < at + n, where g is their sum. With `stream`, outputs are aligned to 64 bytes
     * at indices that are multiples of 16, and `at` is such a multiple. */
    void (*step)(const ef_step *s, int stream, const float *g, int64_t at, int64_t n);
    /* Quantise n elements from `at`, a multiple of EF_SCALE_BLOCK. Overlap: see ef_quantization. */
    void (*quantize)(const ef_quantization *q, int64_t at, int64_t n);
    /* Squared norm of n <= EF_TILE elements from `at`, a multiple of EF_TILE. */
    double (*block_norm)(const ef_update *u, int64_t at, int64_t n);
    /* s[0] += sum_i w_i and s[1] += sum_i (i + 1) * w_i over n 32-bit words, modulo 2^64, 0 <= i < n. */
    void (*words)(const unsigned char *p, int64_t n, uint64_t s[2]);
    /* out = trained - base, and s as above for the words of out. `around`: use non-temporal stores, out is aligned to
     * 64 bytes. trained and base may overlap each other. */
    void (*delta)(ef_loose_float *__restrict out, const ef_loose_float *trained, const ef_loose_float *base,
                  int64_t n, int around, uint64_t s[2]);
    void (*trimmed)(const ef_order *o, int64_t at, int64_t n);
    void (*products)(const ef_order *o, int64_t at, int64_t n, double *lanes, double *out);
    void (*field_sum)(const ef_field_sum *s, int64_t at, int64_t n);
    int64_t (*field_encode)(const ef_field_code *c, int64_t at, int64_t n);
    uint32_t (*field_decode)(const ef_field_code *c, int64_t at, int64_t n);
} ef_isa;

/* cpu.c */
const ef_isa *ef_isa_now(void);
int ef_isa_set(const char *name); /* 0: not available */
const char *ef_isa_name(int i);   /* i-th available set, fastest first; NULL after the last */
/* Write base + the updates' weighted sum to out; with a step, apply it to the sum instead and ignore out. base,
 * checksums and step may be NULL. out may be base; outputs overlap nothing else. Arrays may be unaligned.
 * -1: out of memory. */
int ef_weighted_sum(float *out, const float *base, const ef_update *u, int64_t count, int64_t n,
                    double *norms, uint64_t *checksums, const ef_step *step, int threads);
/* *norm: the squared norm of q->out, as from ef_sq_norm. -1: out of memory. */
int ef_quantize(const ef_quantization *q, int64_t n, int threads, double *norm);
int ef_sq_norm(const ef_update *u, int64_t n, int threads, double *norm); /* -1: out of memory */
void ef_trimmed_mean(const ef_order *o, int threads);
int ef_products(const ef_order *o, double *out, int threads); /* out: count x count; -1: out of memory */
void ef_field_sum_of(const ef_field_sum *s, int threads);
int64_t ef_field_encode(const ef_field_code *c, int threads);  /* the number of limited elements */
uint32_t ef_field_decode(const ef_field_code *c, int threads); /* the largest magnitude */
uint64_t ef_folded(const uint64_t s[2], const unsigned char *p, int64_t bytes); /* s: sums over all whole words */
uint64_t ef_checksum(const unsigned char *p, int64_t bytes, int threads);

/* pool.c: run task(context, i) for every 0 <= i < count on up to `threads` threads, including the caller's. */
typedef void (*ef_task)(void *context, int64_t i);
void ef_pool_run(ef_task task, void *context, int64_t count, int threads);
void ef_pool_close(void);
int ef_pool_size(void);

/* staleness.c */
enum ef_average { EF_WINDOW, EF_CUMULATIVE, EF_EXPONENTIAL };
typedef struct {
    int mode;
    int64_t clients, width; /* width: entries per client, the window's length or 1 */
    double decay;
    int64_t *count; /* clients */
    double *state;  /* clients x width */
} ef_means;
double ef_mean(const ef_means *m, int64_t client);
double ef_observe(const ef_means *m, int64_t client, double value);

#endif
