/* The picture of a roofline. Callers: nibble roofline. Source of the diagram: Williams, Waterman,
 * Patterson, "Roofline", CACM 52(4), 2009. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "perf/roofline.h"
#include "perf/svg.h"

#define SHOWN_SHARE 0.002 /* of the step: smaller parts have no point and no bar */

typedef struct picture {
    double roof_x[3], roof_y[3];
    double at_x[NBI_ROOF_PART_COUNT], at_y[NBI_ROOF_PART_COUNT];
    double bar_x[NBI_ROOF_PART_COUNT], bar_y[NBI_ROOF_PART_COUNT];
    const char *at_labels[NBI_ROOF_PART_COUNT], *bar_labels[NBI_ROOF_PART_COUNT];
    char names[NBI_ROOF_PART_COUNT][128], texts[NBI_ROOF_PART_COUNT][64];
    size_t n_points, n_bars;
} picture;

/* Operations per byte against operations per second. Parts at the same place share a label. */
static void add_point(picture *p, nbi_roof_part part, const nbi_roof_cost *c)
{
    if (!(c->bytes > 0) || !(c->flops > 0)) return;
    const double x = c->flops / c->bytes, y = c->flops / c->seconds * 1e-12;
    size_t i = 0;
    while (i < p->n_points && (fabs(log(p->at_x[i] / x)) > 0.2 || fabs(log(p->at_y[i] / y)) > 0.2))
        i++;
    if (i == p->n_points) {
        p->at_x[i] = x;
        p->at_y[i] = y;
        p->at_labels[i] = p->names[i];
        p->n_points++;
    }
    const size_t at = strlen(p->names[i]);
    snprintf(p->names[i] + at, sizeof p->names[i] - at, "%s%s", at ? ", " : "",
             nbi_roof_part_name(part));
}

static void add_bar(picture *p, nbi_roof_part part, const nbi_roof_cost *c, double step)
{
    char *text = p->texts[p->n_bars];
    snprintf(text, sizeof p->texts[0], "%s, %.1f %%", nbi_roof_part_name(part),
             100 * c->seconds / step);
    p->bar_x[p->n_bars] = c->seconds * 1e3;
    p->bar_y[p->n_bars] = -(double)p->n_bars;
    p->bar_labels[p->n_bars++] = text;
}

static void add_roof(picture *p, const nbi_device *d)
{
    double low = 1, high = 1;
    for (size_t i = 0; i < p->n_points; i++) {
        low = fmin(low, p->at_x[i]);
        high = fmax(high, p->at_x[i]);
    }
    const double ridge = d->flops_bf16 > 0 ? d->flops_bf16 / d->bandwidth : high * 4;
    p->roof_x[0] = low / 2;
    p->roof_x[1] = ridge;
    p->roof_x[2] = fmax(ridge, high) * 4;
    for (int i = 0; i < 3; i++) {
        const double by_bytes = p->roof_x[i] * d->bandwidth;
        p->roof_y[i] = (d->flops_bf16 > 0 ? fmin(by_bytes, d->flops_bf16) : by_bytes) * 1e-12;
    }
}

nb_status nbi_roofline_plot(const nbi_roofline *r, const nbi_roof_options *o, const char *title,
                            const char *path, nb_error *err)
{
    picture p = {.n_points = 0};
    for (int i = 0; i < NBI_ROOF_PART_COUNT; i++) {
        const nbi_roof_cost *c = &r->parts[i];
        if (c->seconds < SHOWN_SHARE * r->step.seconds) continue;
        if (i != NBI_ROOF_COLLECTIVES) add_point(&p, (nbi_roof_part)i, c);
        add_bar(&p, (nbi_roof_part)i, c, r->step.seconds);
    }
    add_roof(&p, &o->device);
    const nbi_svg_series roofs[] = {
        {o->device.label, p.roof_x, p.roof_y, 3, NBI_SVG_LINE, NULL},
        {NULL, p.at_x, p.at_y, p.n_points, NBI_SVG_POINTS, p.at_labels}};
    /* Single points draw nothing, but make room above and below the bars and for their labels. */
    const double right = 1.6 * r->step.seconds * 1e3, above = 1, below = -(double)p.n_bars;
    const nbi_svg_series bars[] = {{NULL, p.bar_x, p.bar_y, p.n_bars, NBI_SVG_BARS, p.bar_labels},
                                   {NULL, &right, &above, 1, NBI_SVG_LINE, NULL},
                                   {NULL, &right, &below, 1, NBI_SVG_LINE, NULL}};
    char head[160], total[96];
    snprintf(head, sizeof head, "%s: at least %.3f ms a step, at most %.0f tokens/s", title,
             r->step.seconds * 1e3, r->tokens_per_s);
    if (o->context == NBI_ROOF_ALL_WEIGHTS)
        snprintf(total, sizeof total, "floor by part, batch %u, weights alone", o->batch);
    else
        snprintf(total, sizeof total, "floor by part, batch %u, context %llu", o->batch,
                 (unsigned long long)o->context);
    const nbi_svg_panel panels[] = {
        {.title = "roofs and parts",
         .x_label = "operations per byte",
         .y_label = "TFLOP/s",
         .x_log = true,
         .y_log = true,
         .series = roofs,
         .n_series = 2},
        {.title = total, .x_label = "ms", .bare_y = true, .series = bars, .n_series = 3}};
    nbi_buf svg = {0};
    nb_status st = nbi_svg_write(&svg, head, panels, 2, 2, err);
    if (st == NB_OK) st = nbi_file_write(path, svg.data, svg.len, err);
    nbi_buf_free(&svg);
    return st;
}
