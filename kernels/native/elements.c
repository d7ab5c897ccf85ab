#include "elements.h"

#include <stddef.h>
#include <string.h>

/* ---- 16 bits ------------------------------------------------------------------------------------------------------ */

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widen_bfloat16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* To nearest, ties to even; a NaN stays one, whatever its payload. */
static inline uint16_t narrow_bfloat16(float value)
{
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

/* In integers, which every processor has in vectors. A number below 2**-14 has its last place where one next to 1/2 has
   it: adding 1/2 shifts it there, and rounds. */
static inline float widen_float16(uint16_t bits)
{
    uint32_t size = bits & 0x7fffu, sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t normal = (size << 13) + (size < 0x7c00u ? 112u << 23 : 224u << 23);
    uint32_t small = to_bits(from_bits(0x3f000000u + size) - 0.5f);
    return from_bits(sign | (size < 0x0400u ? small : normal));
}

/* As narrow_bfloat16; from 65520 on it is infinite. */
static inline uint16_t narrow_float16(float value)
{
    uint32_t bits = to_bits(value), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    uint32_t normal = (size + 0xfffu + (size >> 13 & 1u) - (112u << 23)) >> 13;
    uint32_t small = to_bits(from_bits(size) + 0.5f) - 0x3f000000u;
    uint32_t rounded = size < 0x38800000u ? small : size < 0x477ff000u ? normal : 0x7c00u;
    return (uint16_t)(sign | (value != value ? 0x7e00u : rounded));
}

/* ---- in and out -------------------------------------------------------------------------------------------------- */

/* A loop of its own for each dtype of 16 bits. */
#define FOR_EACH_DTYPE(LOOP)  \
    if (dtype == BFLOAT16)    \
        LOOP(bfloat16);       \
    else                      \
        LOOP(float16)

CLONED void elements_load(float *restrict to, const void *from, Dtype dtype, long first, int stride, int count)
{
    if (dtype == FLOAT32) {
        const float *restrict source = (const float *)from + first;
        if (stride == 1)
            memcpy(to, source, (size_t)count * sizeof *to);
        else
            for (int i = 0; i < count; i++)
                to[i] = source[2 * i];
        return;
    }
    const uint16_t *restrict source = (const uint16_t *)from + first;
#define LOOP(NAME)                                 \
    for (int i = 0; i < count; i++)                \
        to[i] = widen_##NAME(source[i])
#define LOOP_OF_2(NAME)                            \
    for (int i = 0; i < count; i++)                \
        to[i] = widen_##NAME(source[2 * i])
    if (stride == 1) {
        FOR_EACH_DTYPE(LOOP);
    }
    else {
        FOR_EACH_DTYPE(LOOP_OF_2);
    }
#undef LOOP
#undef LOOP_OF_2
}

CLONED void elements_store(void *to, const float *restrict from, Dtype dtype, long first, int stride, int count)
{
    if (dtype == FLOAT32) {
        float *restrict target = (float *)to + first;
        if (stride == 1)
            memcpy(target, from, (size_t)count * sizeof *from);
        else
            for (int i = 0; i < count; i++)
                target[2 * i] = from[i];
        return;
    }
    uint16_t *restrict target = (uint16_t *)to + first;
#define LOOP(NAME)                                 \
    for (int i = 0; i < count; i++)                \
        target[i] = narrow_##NAME(from[i])
#define LOOP_OF_2(NAME)                            \
    for (int i = 0; i < count; i++)                \
        target[2 * i] = narrow_##NAME(from[i])
    if (stride == 1) {
        FOR_EACH_DTYPE(LOOP);
    }
    else {
        FOR_EACH_DTYPE(LOOP_OF_2);
    }
#undef LOOP
#undef LOOP_OF_2
}

CLONED void elements_add(float *restrict total, const void *from, Dtype dtype, long first, int count)
{
    if (dtype == FLOAT32) {
        const float *restrict source = (const float *)from + first;
        for (int i = 0; i < count; i++)
            total[i] += source[i];
        return;
    }
    const uint16_t *restrict source = (const uint16_t *)from + first;
#define LOOP(NAME)                                 \
    for (int i = 0; i < count; i++)                \
        total[i] += widen_##NAME(source[i])
    FOR_EACH_DTYPE(LOOP);
#undef LOOP
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* e**x within two units in the last place (a test holds it to that): x = n ln 2 + r with |r| <= ln(2)/2, a polynomial
   of e**r (Cephes' expf, Moshier), and the power of two in two factors so that results next to overflow and
   subnormal ones come out. NaN stays NaN; large arguments give inf, small ones 0. */
static inline float exponential(float x)
{
    const float rounder = 12582912.0f; /* 1.5 * 2**23: adding and taking it away rounds to an integer */
    x = x > 90.0f ? 90.0f : x;         /* a NaN passes both */
    x = x < -105.0f ? -105.0f : x;
    float shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t power = (int32_t)(to_bits(shifted) - to_bits(rounder)), half = power >> 1;
    return p * from_bits((uint32_t)(half + 127) << 23) * from_bits((uint32_t)(power - half + 127) << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* The error function within two units in the last place: polynomials (N. Juffa's), of x near 0 and in the exponent
   beyond. */
static inline float error_function(float x)
{
    float t = x < 0.0f ? -x : x, s = x * x;
    float far = 3.83197126e-4f - 1.72853470e-5f * t;
    far = far * s + (2.42546219e-2f - 3.88396438e-3f * t);
    far = far * t - 1.06777877e-1f;
    far = far * t - 6.34846687e-1f;
    far = far * t - 1.28717512e-1f;
    far = 1.0f - exponential(far * t - t);
    float near = 4.99119423e-3f - 5.96761703e-4f * s;
    near = near * s - 2.67681349e-2f;
    near = near * s + 1.12819925e-1f;
    near = near * s - 3.76125336e-1f;
    near = near * s + 1.28379166e-1f;
    return t > 0.921875f ? (x < 0.0f ? -far : far) : near * x + x;
}

#define ROOT_HALF 0.70710678118654752f
#define NORMAL_PEAK 0.39894228040143268f /* 1 / sqrt(2 pi) */
#define GELU_SCALE 1.5957691216057308f /* 2 sqrt(2/pi): 1 + tanh(y) = 2 sigmoid(2y) */
#define GELU_CUBE 0.044715f

/* relu of a NaN is NaN, as torch's. */
static inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

/* f(x), and its slope in *slope; which activation it is, the compiler knows where this is inlined. */
static INLINED float activate(float x, Activation activation, float *slope)
{
    float s;
    switch (activation) {
    case SILU:
        s = sigmoid(x);
        *slope = s * (1.0f + x * (1.0f - s));
        return x * s;
    case GELU_TANH:
        s = sigmoid(GELU_SCALE * (x + GELU_CUBE * x * x * x));
        *slope = s + x * s * (1.0f - s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
        return x * s;
    case GELU:
        s = 0.5f * (1.0f + error_function(x * ROOT_HALF));
        *slope = s + x * NORMAL_PEAK * exponential(-0.5f * x * x);
        return x * s;
    case RELU:
        *slope = x <= 0.0f ? 0.0f : 1.0f;
        return relu(x);
    case RELU2:
        *slope = 2.0f * relu(x);
        return relu(x) * relu(x);
    case SIGMOID:
        s = sigmoid(x);
        *slope = s * (1.0f - s);
        return s;
    default:
        *slope = 1.0f;
        return x;
    }
}

/* ---- the gate ---------------------------------------------------------------------------------------------------- */

/* A loop of its own for each activation, which the compiler then knows. */
#define FOR_EACH_ACTIVATION(LOOP)         \
    switch (activation) {                 \
    case SILU: LOOP(SILU);                \
    case GELU_TANH: LOOP(GELU_TANH);      \
    case RELU: LOOP(RELU);                \
    case RELU2: LOOP(RELU2);              \
    case SIGMOID: LOOP(SIGMOID);          \
    case GELU: LOOP(GELU);                \
    default: LOOP(IDENTITY);              \
    }

static INLINED void forward(float *restrict a, const float *restrict gate, const float *restrict up, float scale,
                            int count, Activation activation)
{
    for (int i = 0; i < count; i++) {
        float slope, value = activate(gate[i], activation, &slope);
        a[i] = (up == NULL ? value : value * up[i]) * scale;
    }
}

CLONED void elements_gated(float *a, const float *gate, const float *up, float scale, Activation activation, int count)
{
#define LOOP(NAME)                                         \
    if (up == NULL)                                        \
        forward(a, gate, NULL, scale, count, NAME);        \
    else                                                   \
        forward(a, gate, up, scale, count, NAME);          \
    break
    FOR_EACH_ACTIVATION(LOOP)
#undef LOOP
}

static INLINED void backward(Grads out, const float *restrict gate, const float *restrict up,
                             const float *restrict grad_a, float scale, int count, Activation activation)
{
    float *restrict a = out.a, *restrict grad_gate = out.gate, *restrict grad_up = out.up, *restrict dot = out.dot;
    for (int i = 0; i < count; i++) {
        float slope, value = activate(gate[i], activation, &slope);
        float scaled = grad_a[i] * scale;
        if (up != NULL) {
            grad_up[i] = value * scaled;
            value *= up[i];
            slope *= up[i];
        }
        dot[i] = grad_a[i] * value;
        grad_gate[i] = slope * scaled;
        a[i] = value * scale;
    }
}

CLONED void elements_gated_backward(Grads out, const float *gate, const float *up, const float *grad_a, float scale,
                                    Activation activation, int count)
{
#define LOOP(NAME)                                                  \
    if (up == NULL)                                                 \
        backward(out, gate, NULL, grad_a, scale, count, NAME);      \
    else                                                            \
        backward(out, gate, up, grad_a, scale, count, NAME);        \
    break
    FOR_EACH_ACTIVATION(LOOP)
#undef LOOP
}

/* Sixteen sums side by side, so that the order is the same whatever the vector width. */
CLONED float elements_sum(const float *restrict a, int count)
{
    float sums[16] = {0};
    int i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++)
            sums[lane] += a[i + lane];
    for (int lane = 0; i < count; i++, lane++)
        sums[lane] += a[i];
    for (int width = 8; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] += sums[lane + width];
    return sums[0];
}
