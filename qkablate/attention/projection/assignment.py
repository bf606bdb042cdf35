"""Who stands where, at the least cost."""

import math
from collections.abc import Sequence


def cheapest(cost: Sequence[Sequence[float]]) -> list[int]:
    """The place of every head that costs least in sum, exactly: shortest augmenting paths (Kuhn,
    1955; Jonker & Volgenant, 1987), in O(n³). Of equals the identity.
    """
    count = len(cost)
    of_head, of_place = [0.0] * count, [0.0] * (count + 1)  # prices; the last place is the door
    owner = [-1] * (count + 1)
    for head in range(count):
        owner[count], here = head, count
        least, came_from = [math.inf] * count, [count] * count
        seen = {count}
        while owner[here] >= 0:
            now = owner[here]
            for place in range(count):
                if place not in seen:
                    reduced = cost[now][place] - of_head[now] - of_place[place]
                    if reduced < least[place]:
                        least[place], came_from[place] = reduced, here
            there = min((p for p in range(count) if p not in seen), key=least.__getitem__)
            step = least[there]
            for place in seen:
                of_head[owner[place]] += step
                of_place[place] -= step
            for place in range(count):
                if place not in seen:
                    least[place] -= step
            here = there
            if owner[here] >= 0:
                seen.add(here)
        while here != count:  # everyone on the way moves on
            owner[here], here = owner[came_from[here]], came_from[here]
        owner[count] = -1
    places = [0] * count
    for place in range(count):
        places[owner[place]] = place
    return places
