/* Axes of the charts: where a series lies in its panel. */
#include "cmocka_all.h"

#include <stdlib.h>
#include <string.h>

#include "perf/svg.h"

/* The heights of the first and the last point of a chart's only line, in pixels from the top. */
static void heights(const nbi_svg_series *series, double *first, double *last)
{
    nbi_buf svg = {0};
    nb_error err = {0};
    const nbi_svg_panel panel = {.x_label = "x", .y_label = "y", .series = series, .n_series = 1};
    if (nbi_svg_write(&svg, "title", &panel, 1, 1, &err) != NB_OK) fail_msg("%s", err.text);
    if (nbi_buf_add(&svg, "", 1) != NB_OK) fail_msg("no memory");
    const char *line = strstr(svg.data, "<path class=\"line\""),
               *path = line ? strstr(line, " d=\"M") : NULL;
    if (!path) fail_msg("no line in %s", svg.data);
    *first = strtod(strchr(path + 5, ' '), NULL);
    const char *end = strchr(path + 5, '"');
    while (*end != ' ') end--;
    *last = strtod(end, NULL);
    nbi_buf_free(&svg);
}

/* A line of one value lies above the axis: a chart of 64 requests under way is not an empty one. */
static void level_lines_are_seen(void **state)
{
    (void)state;
    double x[] = {0, 1, 2}, level[] = {64, 64, 64}, rising[] = {0, 32, 64}, first, last;
    const nbi_svg_series flat = {.x = x, .y = level, .n = 3}, slope = {.x = x, .y = rising, .n = 3};
    double bottom, top;
    heights(&slope, &bottom, &top);
    assert_true(top < bottom);
    heights(&flat, &first, &last);
    assert_true(first == last);
    assert_true(first < bottom - 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(level_lines_are_seen)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
