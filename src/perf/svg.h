/* Charts as SVG, for reports: panels with axes, grid, lines, points and labels. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_svg_style {
    NBI_SVG_LINE,
    NBI_SVG_POINTS,
    NBI_SVG_STEPS, /* y holds until the next x */
    NBI_SVG_BARS,  /* from the left end to x, at height y; labels behind them */
} nbi_svg_style;

typedef struct nbi_svg_series {
    const char *name; /* in the legend; NULL: not there */
    const double *x,
        *y; /* [n]; what is not finite, or not above 0 on a logarithmic axis, is left out */
    size_t n;
    nbi_svg_style style;
    const char *const *labels; /* [n] beside the points, or NULL */
} nbi_svg_series;

typedef struct nbi_svg_panel {
    const char *title, *x_label, *y_label; /* UTF-8; may be NULL */
    bool x_log, y_log;
    double y_max;                 /* upper end of the y axis; 0: from the data */
    const nbi_svg_series *series; /* [n_series] */
    size_t n_series;
    bool bare_y; /* no grid and numbers for y */
} nbi_svg_panel;

/* Writes a whole document with the panels in rows of `columns` to the end of `out`. Long series are
 * thinned to what can be seen. NB_NO_MEMORY, NB_TOO_LARGE. */
nb_status nbi_svg_write(nbi_buf *out, const char *title, const nbi_svg_panel *panels, size_t n,
                        size_t columns, nb_error *err);

#ifdef __cplusplus
}
#endif
