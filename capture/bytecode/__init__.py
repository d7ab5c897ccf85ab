"""What a code object says of itself: liveness, exception tables, places; short instruction sequences. No torch. May
import hook."""
