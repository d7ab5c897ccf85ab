#include "elements.h"

#include <stddef.h>
#include <string.h>

/* ---- bfloat16 ---------------------------------------------------------------------------------------------------- */

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

static inline float widen(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* To nearest, ties to even; a NaN stays one, whatever its payload. */
static inline uint16_t narrow(float value)
{
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

/* ---- in and out -------------------------------------------------------------------------------------------------- */

CLONED void elements_load(float *restrict to, const void *from, Dtype dtype, long first, int stride, int count)
{
    if (dtype == FLOAT32) {
        const float *restrict source = (const float *)from + first;
        if (stride == 1)
            memcpy(to, source, (size_t)count * sizeof *to);
        else
            for (int i = 0; i < count; i++)
                to[i] = source[2 * i];
    }
    else {
        const uint16_t *restrict source = (const uint16_t *)from + first;
        if (stride == 1)
            for (int i = 0; i < count; i++)
                to[i] = widen(source[i]);
        else
            for (int i = 0; i < count; i++)
                to[i] = widen(source[2 * i]);
    }
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
    }
    else {
        uint16_t *restrict target = (uint16_t *)to + first;
        if (stride == 1)
            for (int i = 0; i < count; i++)
                target[i] = narrow(from[i]);
        else
            for (int i = 0; i < count; i++)
                target[2 * i] = narrow(from[i]);
    }
}

CLONED void elements_add(float *restrict total, const void *from, Dtype dtype, long first, int count)
{
    if (dtype == FLOAT32) {
        const float *restrict source = (const float *)from + first;
        for (int i = 0; i < count; i++)
            total[i] += source[i];
    }
    else {
        const uint16_t *restrict source = (const uint16_t *)from + first;
        for (int i = 0; i < count; i++)
            total[i] += widen(source[i]);
    }
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

#define GELU_SCALE 1.5957691216057308f /* 2 sqrt(2/pi): 1 + tanh(y) = 2 sigmoid(2y) */
#define GELU_CUBE 0.044715f

/* One loop for a value alone and one for value and slope; EACH says both for an element x. */
#define EACH(VALUE, SLOPE)                        \
    if (slope == NULL)                            \
        for (int i = 0; i < count; i++) {         \
            float x = xs[i];                      \
            value[i] = VALUE;                     \
        }                                         \
    else                                          \
        for (int i = 0; i < count; i++) {         \
            float x = xs[i];                      \
            value[i] = VALUE;                     \
            slope[i] = SLOPE;                     \
        }                                         \
    break

static inline float silu_slope(float x)
{
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

static inline float gelu_inner(float x) { return GELU_SCALE * (x + GELU_CUBE * x * x * x); }

static inline float gelu_slope(float x)
{
    float s = sigmoid(gelu_inner(x));
    return s + x * s * (1.0f - s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
}

static inline float sigmoid_slope(float x)
{
    float s = sigmoid(x);
    return s * (1.0f - s);
}

/* relu of a NaN is NaN, as torch's. */
static inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

CLONED void elements_activate(float *restrict value, float *restrict slope, const float *restrict xs,
                              Activation activation, int count)
{
    switch (activation) {
    case SILU: EACH(x * sigmoid(x), silu_slope(x));
    case GELU_TANH: EACH(x * sigmoid(gelu_inner(x)), gelu_slope(x));
    case RELU: EACH(relu(x), (x <= 0.0f ? 0.0f : 1.0f));
    case RELU2: EACH(relu(x) * relu(x), 2.0f * relu(x));
    case SIGMOID: EACH(sigmoid(x), sigmoid_slope(x));
    default: EACH(x, 1.0f);
    }
}

CLONED void elements_multiply(float *restrict a, const float *restrict b, int count)
{
    for (int i = 0; i < count; i++)
        a[i] *= b[i];
}

CLONED void elements_scale(float *restrict a, float factor, int count)
{
    for (int i = 0; i < count; i++)
        a[i] *= factor;
}

/* Sixteen sums side by side, so that the order is the same whatever the vector width. */
CLONED float elements_dot(const float *restrict a, const float *restrict b, int count)
{
    float sums[16] = {0};
    int i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++)
            sums[lane] += a[i + lane] * b[i + lane];
    for (int lane = 0; i < count; i++, lane++)
        sums[lane] += a[i] * b[i];
    for (int width = 8; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] += sums[lane + width];
    return sums[0];
}
