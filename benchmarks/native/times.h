/* How long requests took, as the store saw them; slow ones apart. */
#ifndef TIMES_H
#define TIMES_H
void times_add(int slow, double time_s, long bytes);
/* Members of a JSON object, with a comma behind; then starts again with nothing. */
void times_print(void);
#endif
