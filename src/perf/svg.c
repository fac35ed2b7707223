/* Axes with round numbers; everything is placed in pixels of a fixed panel size. */
#include "perf/svg.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

enum {
    PANEL_W = 520,
    PANEL_H = 320,
    LEFT = 64,
    RIGHT = 16,
    TOP = 36,
    BOTTOM = 48,
    HEAD = 40,         /* the document's title */
    MAX_POINTS = 1500, /* of a series: more than pixels across */
    MAX_TICKS = 24,
    BAR_H = 13,
};

static const char *const colours[] = {"#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280"};

typedef struct axis {
    double low, high; /* of the data, or their logarithms */
    double ticks[MAX_TICKS];
    size_t n_ticks;
    bool log;
} axis;

/* ---- axes */

static bool place(const axis *a, double v, double *out)
{
    if (!isfinite(v) || (a->log && v <= 0)) return false;
    *out = ((a->log ? log10(v) : v) - a->low) / (a->high - a->low);
    return *out >= -1e-9 && *out <= 1 + 1e-9;
}

/* A step of 1, 2 or 5 times a power of ten, for about five of them. */
static double round_step(double range)
{
    double raw = range / 5, power = pow(10, floor(log10(raw))), m = raw / power;
    return power * (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10);
}

static void linear_axis(axis *a, double top)
{
    /* From zero, unless that leaves little of the height. A level line would lie on the axis. */
    if (a->low > 0 && (a->low < a->high * 0.7 || !(a->high > a->low))) a->low = 0;
    if (top > 0) a->high = top;
    if (!(a->high > a->low)) a->high = a->low + (a->low != 0 ? fabs(a->low) * 0.1 : 1);
    double step = round_step(a->high - a->low);
    a->low = floor(a->low / step + 1e-9) * step;
    if (!(top > 0)) a->high = ceil(a->high / step - 1e-9) * step;
    for (size_t i = 0; i < MAX_TICKS && a->low + (double)i * step <= a->high + step * 1e-6; i++)
        a->ticks[a->n_ticks++] = a->low + (double)i * step;
}

static void log_axis(axis *a)
{
    a->low = floor(log10(a->low) * 3) / 3; /* thirds of a decade: 1, 2.2, 4.6 */
    a->high = ceil(log10(a->high) * 3) / 3;
    if (!(a->high > a->low)) a->high = a->low + 1.0 / 3;
    const bool few = a->high - a->low < 2.5;
    for (int e = (int)floor(a->low); e <= (int)ceil(a->high); e++)
        for (int m = 1; m < 10; m = m == 1 ? 2 : m == 2 ? 5 : 10) {
            double v = m * pow(10, e), at = log10(v);
            if ((m != 1 && !few) || at < a->low - 1e-9 || at > a->high + 1e-9) continue;
            if (a->n_ticks < MAX_TICKS) a->ticks[a->n_ticks++] = v;
        }
}

static axis make_axis(const nbi_svg_panel *p, bool is_x)
{
    axis a = {.low = INFINITY, .high = -INFINITY, .log = is_x ? p->x_log : p->y_log};
    for (size_t s = 0; s < p->n_series; s++)
        for (size_t i = 0; i < p->series[s].n; i++) {
            double v = is_x ? p->series[s].x[i] : p->series[s].y[i];
            if (!isfinite(v) || (a.log && v <= 0)) continue;
            a.low = fmin(a.low, v);
            a.high = fmax(a.high, v);
        }
    if (!(a.low <= a.high)) { /* no data */
        a.low = a.log ? 1 : 0;
        a.high = a.log ? 10 : 1;
    }
    if (a.log)
        log_axis(&a);
    else
        linear_axis(&a, is_x ? 0 : p->y_max);
    return a;
}

/* ---- text */

/* Text between tags: markup is escaped, what is not valid UTF-8 or XML becomes '?'. */
static nb_status add_text(nbi_buf *out, const char *text)
{
    for (size_t n = strlen(text); n;) {
        uint32_t code;
        size_t taken = nbi_utf8_next(text, n, &code);
        if (code == '&' || code == '<' || code == '>')
            NB_TRY(nbi_buf_addf(out, "&#%u;", code));
        else if (code == NBI_UTF8_BAD || code < ' ' || (code & 0xfffe) == 0xfffe)
            NB_TRY(nbi_buf_add(out, "?", 1));
        else
            NB_TRY(nbi_buf_add(out, text, taken));
        text += taken;
        n -= taken;
    }
    return NB_OK;
}

static nb_status add_label(nbi_buf *out, double x, double y, const char *attributes,
                           const char *text)
{
    if (!text) return NB_OK;
    NB_TRY(nbi_buf_addf(out, "<text x=\"%.1f\" y=\"%.1f\"%s>", x, y, attributes));
    NB_TRY(add_text(out, text));
    return nbi_buf_addf(out, "</text>\n");
}

/* ---- a panel */

static double px(double share)
{
    return LEFT + share * (PANEL_W - LEFT - RIGHT);
}

static double py(double share)
{
    return PANEL_H - BOTTOM - share * (PANEL_H - TOP - BOTTOM);
}

static nb_status add_axes(nbi_buf *out, const nbi_svg_panel *p, const axis *x, const axis *y)
{
    char text[32];
    double at;
    for (size_t i = 0; i < x->n_ticks; i++) {
        if (!place(x, x->ticks[i], &at)) continue;
        NB_TRY(nbi_buf_addf(out, "<path class=\"grid\" d=\"M%.1f %.1fV%.1f\"/>\n", px(at), py(0),
                            py(1)));
        snprintf(text, sizeof text, "%.6g", x->ticks[i]);
        NB_TRY(add_label(out, px(at), py(0) + 16, " class=\"mid\"", text));
    }
    for (size_t i = 0; i < y->n_ticks && !p->bare_y; i++) {
        if (!place(y, y->ticks[i], &at)) continue;
        NB_TRY(nbi_buf_addf(out, "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>\n", px(0), py(at),
                            px(1)));
        snprintf(text, sizeof text, "%.6g", y->ticks[i]);
        NB_TRY(add_label(out, px(0) - 6, py(at) + 4, " class=\"end\"", text));
    }
    NB_TRY(nbi_buf_addf(out, "<path class=\"axis\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", px(0), py(1),
                        py(0), px(1)));
    NB_TRY(add_label(out, px(0), TOP - 14, " class=\"title\"", p->title));
    NB_TRY(add_label(out, px(0.5), PANEL_H - 12, " class=\"mid\"", p->x_label));
    char turn[80];
    snprintf(turn, sizeof turn, " class=\"mid\" transform=\"rotate(-90 14 %.1f)\"", py(0.5));
    return add_label(out, 14, py(0.5), turn, p->y_label);
}

static nb_status add_points(nbi_buf *out, const nbi_svg_series *s, const axis *x, const axis *y,
                            const char *colour)
{
    const size_t stride = s->n / MAX_POINTS + 1;
    double ax, ay;
    for (size_t i = 0; i < s->n; i += stride) {
        if (!place(x, s->x[i], &ax) || !place(y, s->y[i], &ay)) continue;
        NB_TRY(nbi_buf_addf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n",
                            px(ax), py(ay), colour));
        if (s->labels) NB_TRY(add_label(out, px(ax) + 5, py(ay) - 5, "", s->labels[i]));
    }
    return NB_OK;
}

static nb_status add_bars(nbi_buf *out, const nbi_svg_series *s, const axis *x, const axis *y,
                          const char *colour)
{
    const double half = BAR_H / 2.0;
    double ax, ay;
    for (size_t i = 0; i < s->n; i++) {
        if (!place(x, s->x[i], &ax) || !place(y, s->y[i], &ay)) continue;
        NB_TRY(nbi_buf_addf(out,
                            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" "
                            "fill=\"%s\"/>\n",
                            px(0), py(ay) - half, px(ax) - px(0), BAR_H, colour));
        if (s->labels) NB_TRY(add_label(out, px(ax) + 5, py(ay) + 4, "", s->labels[i]));
    }
    return NB_OK;
}

static nb_status add_line(nbi_buf *out, const nbi_svg_series *s, const axis *x, const axis *y,
                          const char *colour)
{
    const size_t stride = s->n / MAX_POINTS + 1;
    double ax, ay, last = 0;
    bool pen = false;
    NB_TRY(nbi_buf_addf(out, "<path class=\"line\" stroke=\"%s\" d=\"", colour));
    for (size_t i = 0; i < s->n; i = i + stride < s->n || i == s->n - 1 ? i + stride : s->n - 1) {
        if (!place(x, s->x[i], &ax) || !place(y, s->y[i], &ay)) {
            pen = false;
            continue;
        }
        if (pen && s->style == NBI_SVG_STEPS) NB_TRY(nbi_buf_addf(out, "H%.1f", px(ax)));
        if (!pen || s->style != NBI_SVG_STEPS || py(ay) != last)
            NB_TRY(nbi_buf_addf(out, "%c%.1f %.1f", pen ? 'L' : 'M', px(ax), py(ay)));
        last = py(ay);
        pen = true;
    }
    return nbi_buf_addf(out, "\"/>\n");
}

static nb_status add_panel(nbi_buf *out, const nbi_svg_panel *p)
{
    const axis x = make_axis(p, true), y = make_axis(p, false);
    NB_TRY(add_axes(out, p, &x, &y));
    double at = py(1) + 14;
    for (size_t i = 0; i < p->n_series; i++) {
        const nbi_svg_series *s = &p->series[i];
        const char *colour = colours[i % (sizeof colours / sizeof *colours)];
        NB_TRY(s->style == NBI_SVG_POINTS ? add_points(out, s, &x, &y, colour)
               : s->style == NBI_SVG_BARS ? add_bars(out, s, &x, &y, colour)
                                          : add_line(out, s, &x, &y, colour));
        if (!s->name) continue;
        char attributes[64];
        snprintf(attributes, sizeof attributes, " class=\"end\" style=\"fill:%s\"", colour);
        NB_TRY(add_label(out, px(1) - 4, at, attributes, s->name));
        at += 15;
    }
    return NB_OK;
}

/* ---- the document */

static nb_status write_document(nbi_buf *out, const char *title, const nbi_svg_panel *panels,
                                size_t n, size_t columns)
{
    const size_t rows = (n + columns - 1) / columns;
    const size_t w = columns * PANEL_W, h = HEAD + rows * PANEL_H;
    NB_TRY(nbi_buf_addf(out,
                        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%zu\" height=\"%zu\" "
                        "viewBox=\"0 0 %zu %zu\">\n<style>\n"
                        "text{font:12px sans-serif;fill:#4a5568}\n"
                        ".title{font-weight:bold;fill:#1a202c}.mid{text-anchor:middle}"
                        ".end{text-anchor:end}\n"
                        ".grid{stroke:#e2e8f0;fill:none}.axis{stroke:#718096;fill:none}\n"
                        ".line{fill:none;stroke-width:1.6;stroke-linejoin:round}\n</style>\n"
                        "<rect width=\"%zu\" height=\"%zu\" fill=\"#ffffff\"/>\n",
                        w, h, w, h, w, h));
    NB_TRY(add_label(out, LEFT, 26, " class=\"title\" style=\"font-size:15px\"", title));
    for (size_t i = 0; i < n; i++) {
        NB_TRY(nbi_buf_addf(out, "<g transform=\"translate(%zu %zu)\">\n", i % columns * PANEL_W,
                            HEAD + i / columns * PANEL_H));
        NB_TRY(add_panel(out, &panels[i]));
        NB_TRY(nbi_buf_addf(out, "</g>\n"));
    }
    return nbi_buf_addf(out, "</svg>\n");
}

nb_status nbi_svg_write(nbi_buf *out, const char *title, const nbi_svg_panel *panels, size_t n,
                        size_t columns, nb_error *err)
{
    nb_status st = write_document(out, title, panels, n, columns ? columns : 1);
    return st == NB_OK ? NB_OK : nbi_fail(err, st, "no memory for the chart");
}
