/* Vectors of 8 floats in one AVX2 register. Norms use fused multiply-adds, which give the same bits as a product and a
 * sum, because the square of a float32 is exact in a double. The float32 sum of updates is never fused.
 *
 * With EF_ZEN4, this file defines variants for 16-bit types on processors that execute a 512-bit operation as two
 * 256-bit operations. They add norms in one 512-bit register of 8 doubles, which is converted from a vector of 8
 * floats. The 16-float vectors of simd_avx512.h would have to be split before this conversion. */
#ifdef EF_ZEN4
#define EF(name) name##_zen4
#define EF_ISA_NAME "zen4"
#define EF_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma,f16c")))
#define EF_HALF_VECTORS 4
#define EF_GROUP_SIZES {6, 5, 5, 5}
typedef struct { __m512d l; } EF(N);
#else
#define EF(name) name##_avx2
#define EF_ISA_NAME "avx2"
#define EF_TARGET __attribute__((target("avx2,fma,f16c")))
#define EF_HALF_VECTORS 2
#define EF_GROUP_SIZES {4, 3, 3, 2}
typedef struct { __m256d l[2]; } EF(N);
#endif
#define EF_W 8
#define EF_F32_VECTORS 2

typedef __m256 EF(V);
typedef uint64_t EF(U) __attribute__((vector_size(32)));

EF_PRIM EF(V) EF(vset)(float x) { return _mm256_set1_ps(x); }
EF_PRIM EF(V) EF(vload)(const void *p) { return _mm256_loadu_ps((const float *)p); }
EF_PRIM void EF(vstore)(float *p, EF(V) v) { _mm256_storeu_ps(p, v); }
EF_PRIM void EF(vstream)(float *p, EF(V) v) { _mm256_stream_ps(p, v); }
EF_PRIM EF(V) EF(vmul)(EF(V) x, EF(V) y) { return _mm256_mul_ps(x, y); }
EF_PRIM EF(V) EF(vadd)(EF(V) x, EF(V) y) { return _mm256_add_ps(x, y); }
EF_PRIM EF(V) EF(vsub)(EF(V) x, EF(V) y) { return _mm256_sub_ps(x, y); }
EF_PRIM EF(V) EF(vdiv)(EF(V) x, EF(V) y) { return _mm256_div_ps(x, y); }
EF_PRIM EF(V) EF(vsqrt)(EF(V) x) { return _mm256_sqrt_ps(x); }
EF_PRIM EF(V) EF(vmin)(EF(V) x, EF(V) y) { return _mm256_min_ps(x, y); } /* x < y ? x : y */
EF_PRIM EF(V) EF(vmax)(EF(V) x, EF(V) y) { return _mm256_max_ps(x, y); } /* x > y ? x : y */
/* Round to the nearest integers, with ties to even. */
EF_PRIM void EF(vround)(int32_t *p, EF(V) v) { _mm256_storeu_si256((__m256i *)p, _mm256_cvtps_epi32(v)); }
/* Multiply the lower halves of the 64-bit lanes. */
EF_PRIM EF(U) EF(uproduct)(EF(U) x, EF(U) y) { return (EF(U))_mm256_mul_epu32((__m256i)x, (__m256i)y); }
EF_PRIM EF(V) EF(vsign)(EF(V) x)
{
    const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f), less = _mm256_set1_ps(-1.0f);
    __m256 sign = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), one);
    sign = _mm256_or_ps(sign, _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), less));
    return _mm256_or_ps(sign, _mm256_and_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), x));
}
EF_PRIM void EF(vstore_f16)(void *p, EF(V) v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, 0)); }
EF_PRIM EF(V) EF(vload_f16)(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
/* Load the same data into both 128-bit halves and shuffle within each half. This is faster than a conversion that
 * widens the elements, because that would move data from one half to the other. */
#define EF_NONE (char)0x80
#define EF_HIGH_WORD(i) EF_NONE, EF_NONE, i, i + 1
EF_PRIM EF(V) EF(vload_bf16)(const void *p)
{
    const __m256i places =
        _mm256_setr_epi8(EF_HIGH_WORD(0), EF_HIGH_WORD(2), EF_HIGH_WORD(4), EF_HIGH_WORD(6),
                         EF_HIGH_WORD(8), EF_HIGH_WORD(10), EF_HIGH_WORD(12), EF_HIGH_WORD(14));
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, places));
}
#define EF_HIGH_BYTE(i) EF_NONE, EF_NONE, EF_NONE, i
EF_PRIM EF(V) EF(vload_i8)(const void *p)
{
    const __m256i places =
        _mm256_setr_epi8(EF_HIGH_BYTE(0), EF_HIGH_BYTE(1), EF_HIGH_BYTE(2), EF_HIGH_BYTE(3),
                         EF_HIGH_BYTE(4), EF_HIGH_BYTE(5), EF_HIGH_BYTE(6), EF_HIGH_BYTE(7));
    int64_t q;
    memcpy(&q, p, 8);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(q), places), 24));
}
#undef EF_NONE
#undef EF_HIGH_WORD
#undef EF_HIGH_BYTE

#ifdef EF_ZEN4
EF_PRIM EF(N) EF(nzero)(void) { return (EF(N)){_mm512_setzero_pd()}; }
EF_PRIM EF(N) EF(nadd)(EF(N) n, EF(V) v)
{
    const __m512d x = _mm512_cvtps_pd(v);
    return (EF(N)){_mm512_fmadd_pd(x, x, n.l)};
}
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p) { return EF(nadd)(n, EF(vload)(p)); }
EF_PRIM void EF(nstore)(double *p, EF(N) n) { _mm512_storeu_pd(p, n.l); }
#else
EF_PRIM EF(N) EF(nzero)(void) { return (EF(N)){{_mm256_setzero_pd(), _mm256_setzero_pd()}}; }
EF_PRIM EF(N) EF(nadd_halves)(EF(N) n, __m128 low, __m128 high)
{
    __m256d lo = _mm256_cvtps_pd(low), hi = _mm256_cvtps_pd(high);
    return (EF(N)){{_mm256_fmadd_pd(lo, lo, n.l[0]), _mm256_fmadd_pd(hi, hi, n.l[1])}};
}
EF_PRIM EF(N) EF(nadd)(EF(N) n, EF(V) v)
{
    return EF(nadd_halves)(n, _mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
/* Conversion to double directly from memory saves two shuffles per vector. */
EF_PRIM EF(N) EF(nadd_at)(EF(N) n, const void *p)
{
    return EF(nadd_halves)(n, _mm_loadu_ps((const float *)p), _mm_loadu_ps((const float *)p + 4));
}
EF_PRIM void EF(nstore)(double *p, EF(N) n)
{
    _mm256_storeu_pd(p, n.l[0]);
    _mm256_storeu_pd(p + 4, n.l[1]);
}
#endif
EF_PRIM EF(N) EF(nadd_half)(EF(N) n, EF(V) v) { return EF(nadd)(n, v); }

/* vadd_square returns sum + x^2, and vsums returns the sum of the elements of each of eight vectors. For a scale block
 * of int8, both are exact in any order, fused or not, because the sum is an integer below 2^24. */
EF_PRIM EF(V) EF(vadd_square)(EF(V) sum, EF(V) x) { return _mm256_fmadd_ps(x, x, sum); }
EF_PRIM void EF(vsums)(float *sums, const EF(V) *v)
{
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    const __m256 a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
    _mm256_storeu_ps(sums, _mm256_add_ps(a, b));
}
