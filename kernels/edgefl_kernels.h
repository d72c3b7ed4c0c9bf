/* Common declarations of the native kernels: block sizes, element types, and the functions that the Python binding
 * (module.c) calls. The block sizes determine the order of partial sums, so changing a block size changes results. */
#ifndef EDGEFL_KERNELS_H
#define EDGEFL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Version of this interface. Increase it whenever the arguments of a function or a block size change. It must equal
 * ABI in edgefl/kernels/selection.py. */
#define EF_ABI 8

#define EF_TILE 2048       /* elements per tile: its partial sum fits in the L1 cache; norms are summed tile by tile */
#define EF_STREAM_BYTES (1 << 20) /* minimum size of an output for non-temporal stores, in bytes */
#define EF_SPAN 8          /* maximum number of tiles per pass over a group of updates */
#define EF_LANES 8         /* interleaved double accumulators of the norm of a tile */
#define EF_SCALE_BLOCK 256 /* int8 elements per float32 scale */
#define EF_GROUP 6         /* maximum number of updates that are read in one pass over a span */
#define EF_GRAIN 16        /* tiles per grain, which is the unit of work of a thread */

/* Types that may be stored at any address, without alignment. */
typedef float ef_loose_float __attribute__((aligned(1)));
typedef uint16_t ef_loose_uint16 __attribute__((aligned(1)));
typedef uint32_t ef_loose_uint32 __attribute__((aligned(1)));

enum ef_dtype { EF_F32, EF_F16, EF_BF16, EF_I8 };
/* Return the number of bytes per element of a type. */
static inline __attribute__((always_inline)) int64_t ef_size(int dtype)
{
    return dtype == EF_F32 ? 4 : dtype == EF_I8 ? 1 : 2;
}

typedef struct {
    const void *data;
    const ef_loose_float *scales; /* int8 only: one scale per EF_SCALE_BLOCK elements */
    float weight;
    int dtype;
} ef_update;

/* A step of the server's optimiser, computed from the sum g while g is in the cache. edgefl/kernels/steps.py has the
 * same equations. The old vectors are only read and the new ones are only written, so a step that was interrupted can
 * be repeated.
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
    float *out, *new_a, *new_b; /* outputs, which overlap no other array; new_b and old_b only if the kind has b */
    const float *base, *old_a, *old_b;
} ef_step;

/* Quantisation of a float32 vector x: out = y rounded to the type of out, where y = weight*x + residual. */
typedef struct {
    const ef_loose_float *x, *residual; /* residual may be NULL */
    float weight;
    int dtype;
    void *out;
    ef_loose_float *scales; /* output, int8 only */
    ef_loose_float *left;   /* output: y - decoded(out), or 0 where this is not finite; may be NULL or residual */
    /* out may be x (float32), and x and residual may overlap; otherwise outputs overlap no other array. */
} ef_quantization;

/* A group of updates of one type, which is added in one pass over n elements, starting with element `at`:
 * to[i] = from[i] + sum_j weight_j * update_j[at + i], and norms[j + t * stride] = the squared norm of tile t of
 * update j.
 *
 * 0 < n <= EF_SPAN * EF_TILE, and `at` is a multiple of EF_TILE. Arrays may be unaligned, except that `to` must be
 * aligned to 64 bytes if `stream` is set. `to` may be `from`, and overlaps no other array. */
typedef struct {
    const ef_update *u;
    int64_t at, n;
    const float *from;
    float *to;
    double *norms;
    int64_t stride;
    int stream; /* use non-temporal stores */
    int fresh;  /* `from` is not in the cache yet, so prefetch it */
} ef_group;

/* Input of trimmed means and inner products of updates with n elements. A trimmed mean of an element is the mean over
 * the updates without the `trim` smallest and the `trim` largest values. */
#define EF_MOST_ORDERED 1024 /* maximum number of updates */
typedef struct {
    ef_loose_float *out;
    const ef_update *u;
    int64_t count, n, trim;
    const int32_t *network; /* pairs (i, j) of a network that sorts the ranks from trim to count - trim - 1;
                               the smaller value moves to i */
    int64_t pairs;
} ef_order;
/* Return the number of elements of each update per pass, a multiple of 32. All updates together fill at most 32 KiB if
 * there are fewer than 128, and 256 bytes each otherwise. */
static inline int64_t ef_order_width(int64_t count) { return count < 128 ? 8192 / count / 32 * 32 : 64; }

/* Arithmetic modulo the prime EF_PRIME, for secure aggregation. All numbers are below EF_PRIME. */
#define EF_PRIME 4294967291u /* 2^32 - 5 */
enum { EF_MOST_FIELD = 65536 }; /* maximum number of vectors in a sum */
typedef struct {
    ef_loose_uint32 *out; /* overlaps no vector */
    const ef_loose_uint32 *const *v;
    const uint64_t *w;
    int64_t count, n;
    int exact; /* the weights add up to at most 2^32, so that the weighted sum fits in 64 bits */
} ef_field_sum;
/* Encoding reads floats and writes words; decoding reads words and writes floats. mask and words may be one array. */
typedef struct {
    ef_loose_float *floats;
    ef_loose_uint32 *words;
    const ef_loose_uint32 *mask;
    int64_t n;
    float clip, factor; /* clip is used only for encoding */
} ef_field_code;

/* The functions for one instruction set. Offsets and counts are in elements. Arrays may be unaligned and must not
 * overlap, with the exceptions below. All functions expect the floating-point state that fp_enter sets. */
typedef struct {
    const char *name;
    void (*group[4])(int count, const ef_group *g); /* one for each ef_dtype; 1 <= count <= EF_GROUP */
    unsigned char most[4];                          /* for each ef_dtype, the largest group that fits in registers */
    /* Apply step s to elements at <= i < at + n, where g is their sum. With `stream`, the outputs must be aligned to 64
     * bytes, and `at` must be a multiple of 16. */
    void (*step)(const ef_step *s, int stream, const float *g, int64_t at, int64_t n);
    /* Quantise n elements from `at`, a multiple of EF_SCALE_BLOCK. ef_quantization states which arrays may overlap. */
    void (*quantize)(const ef_quantization *q, int64_t at, int64_t n);
    /* Return the squared norm of n <= EF_TILE elements from `at`, a multiple of EF_TILE. */
    double (*block_norm)(const ef_update *u, int64_t at, int64_t n);
    /* s[0] += sum_i w_i and s[1] += sum_i (i + 1) * w_i over n 32-bit words, modulo 2^64, 0 <= i < n. */
    void (*words)(const unsigned char *p, int64_t n, uint64_t s[2]);
    /* out = trained - base; also add the words of out to s, as `words` does. With `around`, out must be aligned to 64
     * bytes, and non-temporal stores are used. trained and base may overlap each other. */
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
int ef_isa_set(const char *name); /* returns 0 if the instruction set is not available */
const char *ef_isa_name(int i);   /* the i-th available instruction set, fastest first; NULL after the last */
/* Write base + the weighted sum of the updates to out. If step is not NULL, apply the step to the sum instead, and
 * ignore out. base, checksums and step may be NULL. out may be base; otherwise outputs overlap no other array. Arrays
 * may be unaligned. Return -1 if memory is exhausted, otherwise 0. */
int ef_weighted_sum(float *out, const float *base, const ef_update *u, int64_t count, int64_t n,
                    double *norms, uint64_t *checksums, const ef_step *step, int threads);
/* Quantise, and set *norm to the squared norm of q->out, as ef_sq_norm does. Return -1 if memory is exhausted. */
int ef_quantize(const ef_quantization *q, int64_t n, int threads, double *norm);
int ef_sq_norm(const ef_update *u, int64_t n, int threads, double *norm); /* returns -1 if memory is exhausted */
void ef_trimmed_mean(const ef_order *o, int threads);
int ef_products(const ef_order *o, double *out, int threads); /* out: count x count; -1 if memory is exhausted */
void ef_field_sum_of(const ef_field_sum *s, int threads);
int64_t ef_field_encode(const ef_field_code *c, int threads);  /* returns the number of clipped elements */
uint32_t ef_field_decode(const ef_field_code *c, int threads); /* returns the largest magnitude */
/* Return the checksum of an array, given s, the sums of `words` over all its whole words. */
uint64_t ef_folded(const uint64_t s[2], const unsigned char *p, int64_t bytes);
uint64_t ef_checksum(const unsigned char *p, int64_t bytes, int threads);

/* pool.c: run task(context, i) for every 0 <= i < count on up to `threads` threads, one of which is the caller's. */
typedef void (*ef_task)(void *context, int64_t i);
void ef_pool_run(ef_task task, void *context, int64_t count, int threads);
void ef_pool_close(void);
int ef_pool_size(void);

/* staleness.c */
enum ef_average { EF_WINDOW, EF_CUMULATIVE, EF_EXPONENTIAL };
typedef struct {
    int mode;
    int64_t clients, width; /* width: entries per client, that is, the length of the window, or 1 without a window */
    double decay;
    int64_t *count; /* number of observations of each client */
    double *state;  /* clients x width */
} ef_means;
double ef_observe(const ef_means *m, int64_t client, double value);

#endif
