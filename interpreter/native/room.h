/* Room on the C stack and levels of recursion: see room.c. */
#ifndef MOEBIUS_ROOM_H
#define MOEBIUS_ROOM_H

/* Whether the C stack has room for another call; RecursionError is set where not. */
int mb_has_room(void);

/* Called by C code, a machine gets levels of C recursion: how many it was given goes back when it ends. */
int mb_begin_machine(void);
void mb_end_machine(int given);

#endif
