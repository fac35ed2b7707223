/* UTF-8 decoding by the ranges of Unicode 15 table 3-7. Called by error texts, JSON output and
 * text. Holds no state. */
#include "base/utf8.h"

static size_t bad(uint32_t *code, size_t taken)
{
    *code = NBI_UTF8_BAD;
    return taken;
}

size_t nbi_utf8_next(const char *s, size_t n, uint32_t *code)
{
    const unsigned char *p = (const unsigned char *)s;
    unsigned char lead = p[0];
    if (lead < 0x80) {
        *code = lead;
        return 1;
    }
    /* Only the second byte has a range that depends on the first. */
    unsigned char low = 0x80, high = 0xbf;
    size_t length;
    uint32_t value;
    if (lead >= 0xc2 && lead <= 0xdf) {
        length = 2;
        value = lead & 0x1fu;
    } else if ((lead & 0xf0) == 0xe0) {
        length = 3;
        value = lead & 0x0fu;
        if (lead == 0xe0) low = 0xa0;
        if (lead == 0xed) high = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
        length = 4;
        value = lead & 0x07u;
        if (lead == 0xf0) low = 0x90;
        if (lead == 0xf4) high = 0x8f;
    } else {
        return bad(code, 1);
    }
    for (size_t i = 1; i < length; i++) {
        if (i >= n || p[i] < low || p[i] > high) return bad(code, i);
        value = value << 6 | (p[i] & 0x3fu);
        low = 0x80;
        high = 0xbf;
    }
    *code = value;
    return length;
}

size_t nbi_utf8_put(char out[4], uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

size_t nbi_utf8_cut(const char *s, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)s[n - back];
        if ((c & 0xc0) == 0x80) continue;
        size_t length = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return length > back ? n - back : n;
    }
    return n;
}

int32_t nbi_hex4(const char s[4])
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const char c = s[i];
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}
