/* Vectors of 16 floats in one AVX-512 register. The 8 lanes of a norm add the lower half of a vector first. So every
 * lane adds its elements in ascending order, as with narrower instruction sets. */
#define EF(name) name##_avx512
#define EF_ISA_NAME "avx512"
#define EF_TARGET __attribute__((target("avx512f,avx512bw")))
#define EF_W 16
#define EF_F32_VECTORS 1
#define EF_HALF_VECTORS 2
#define EF_GROUP_SIZES {6, 6, 6, 5}

typedef __m512 EF(V);
typedef struct { __m512d l; } EF(N);
typedef uint64_t EF(U) __attribute__((vector_size(64)));

EF_PRIM EF(V) EF(vset)(float x) { return _mm512_set1_ps(x); }
EF_PRIM EF(V) EF(vload)(const void *p) { return _mm512_loadu_ps(p); }
EF_PRIM void EF(vstore)(float *p, EF(V) v) { _mm512_storeu_ps(p, v); }
EF_PRIM void EF(vstream)(float *p, EF(V) v) { _mm512_stream_ps(p, v); }
EF_PRIM EF(V) EF(vmul)(EF(V) x, EF(V) y) { return _mm512_mul_ps(x, y); }
EF_PRIM EF(V) EF(vadd)(EF(V) x, EF(V) y) { return _mm512_add_ps(x, y); }
EF_PRIM EF(V) EF(vsub)(EF(V) x, EF(V) y) { return _mm512_sub_ps(x, y); }
EF_PRIM EF(V) EF(vdiv)(EF(V) x, EF(V) y) { return _mm512_div_ps(x, y); }
EF_PRIM EF(V) EF(vsqrt)(EF(V) x) { return _mm512_sqrt_ps(x); }
EF_PRIM EF(V) EF(vmin)(EF(V) x, EF(V) y) { return _mm512_min_ps(x, y); } /* x < y ? x : y */
EF_PRIM EF(V) EF(vmax)(EF(V) x, EF(V) y) { return _mm512_max_ps(x, y); } /* x > y ? x : y */
EF_PRIM EF(V) EF(vsign)(EF(V) x)
{
    const __m512 zero = _mm512_setzero_ps();
    __m512 sign = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
    sign = _mm512_mask_mov_ps(sign, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
    return _mm512_mask_mov_ps(sign, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
EF_PRIM void EF(vstore_f16)(void *p, EF(V) v) { _mm256_storeu_si256(p, _mm512_cvtps_ph(v, 0)); }
EF_PRIM EF(V) EF(vload_f16)(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
EF_PRIM EF(V) EF(vload_bf16)(const void *p)
{
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
EF_PRIM EF(V) EF(vload_i8)(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* Round to the nearest integers, with ties to even. */
EF_PRIM void EF(vround)(int32_t *p, EF(V) v) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(v)); }
/* Multiply the lower halves of the 64-bit lanes. */
EF_PRIM EF(U) EF(uproduct)(EF(U) x, EF(U) y) { return (EF(U))_mm512_mul_epu32((__m512i)x, (__m512i)y); }

EF_PRIM EF(N) EF(nzero)(void) { return (EF(N)){_mm512_setzero_pd()}; }
EF_PRIM EF(N) EF(nadd_halves)(EF(N) n, __m256 low, __m256 high)
{
    __m512d lo = _mm512_cvtps_pd(low), hi = _mm512_cvtps_pd(high);
    return (EF(N)){_mm512_fmadd_pd(hi, hi, _mm512_fmadd_pd(lo, lo, n.l))};
}
EF_PRIM EF(N) EF(nadd)(EF(N) n, EF(V) v)
{
    __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(v), 1);
    return EF(nadd_halves)(n, _mm512_castps512_ps256(v), _mm256_castpd_ps(high));
}
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p)
{
    return EF(nadd_halves)(n, _mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8));
}
/* Add the squares of a vector in a register to a norm. The vector is first stored on the stack, because conversion to
 * double from memory saves three shuffles. */
EF_PRIM EF(N) EF(nadd_half)(EF(N) n, EF(V) v)
{
    float x[16] __attribute__((aligned(64)));
    _mm512_store_ps(x, v);
    __asm__("" : "+m"(x)); /* prevents the compiler from removing the store and the load */
    return EF(nadd_at)(n, x);
}
EF_PRIM void EF(nstore)(double *p, EF(N) n) { _mm512_storeu_pd(p, n.l); }

/* vadd_square returns sum + x^2, and vsums returns the sum of the elements of each of eight vectors. For a scale block
 * of int8, both are exact in any order, fused or not, because the sum is an integer below 2^24. */
EF_PRIM EF(V) EF(vadd_square)(EF(V) sum, EF(V) x) { return _mm512_fmadd_ps(x, x, sum); }
EF_PRIM void EF(vsums)(float *sums, const EF(V) *v)
{
    __m256 half[8];
    for (int i = 0; i < 8; i++) {
        const __m512d pairs = _mm512_castps_pd(v[i]);
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm256_castpd_ps(_mm512_extractf64x4_pd(pairs, 1)));
    }
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(half[4], half[5]), _mm256_hadd_ps(half[6], half[7]));
    const __m256 a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
    _mm256_storeu_ps(sums, _mm256_add_ps(a, b));
}
