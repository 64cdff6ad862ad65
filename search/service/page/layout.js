// Where each step is drawn: depth makes columns; subtrees are moved together as far as their steps allow (after Reingold
// and Tilford, 1981); a step stands level with the middle of its children that lead somewhere. Positions are those of all
// nodes known so far, so that nothing moves in a replay.

const LABELLED_COLUMN = 84; // a column narrower than this has no text
const WIDEST_COLUMN = 190;
const NARROWEST_COLUMN = 26;
const LEFT = 16;
const TOP = 10;
const RIGHT = 70; // room for an answer
const ROW = 28;
const BARE_ROW = 19; // without text
const THIN_ROW = 9; // of a leaf that leads nowhere, in a tree that is too high
const TALLEST = 620; // height up to which all leaves have their text

// Whether text fits beside all steps without scrolling to the side: answers stand there.
export function labelsFit(marks, width) {
  const steps = [...marks.values()];
  const depth = Math.max(1, ...steps.map((mark) => mark.node.depth));
  const complete = steps.filter((mark) => mark.kind === "complete").length;
  return depth * LABELLED_COLUMN <= width - LEFT - RIGHT && complete * ROW <= 4 * TALLEST;
}

// Lays out marks of `Search.marksAt`.
//
// Returns places by node id ({x, y, thin}; thin ones have no text), the width of a column, and the size of the whole.
export function layOut(marks, width, labelled) {
  const children = new Map([...marks.keys()].map((id) => [id, []]));
  let depth = 1;
  for (const mark of marks.values()) {
    depth = Math.max(depth, mark.node.depth);
    if (mark.node.parent) children.get(mark.node.parent.id).push(mark);
  }
  for (const list of children.values()) list.sort(byPath);
  const least = labelled ? LABELLED_COLUMN : NARROWEST_COLUMN;
  const column = Math.min(Math.max((width - LEFT - RIGHT) / depth, least), WIDEST_COLUMN);
  const row = labelled ? ROW : BARE_ROW;
  let rows = stack(marks, children, () => row);
  const isThin = (mark) => !mark.leads && !children.get(mark.node.id).length;
  const squeezed = rows.height > TALLEST;
  if (squeezed) rows = stack(marks, children, (mark) => (isThin(mark) ? THIN_ROW : row));

  const places = new Map();
  for (const [id, mark] of marks) {
    places.set(id, { x: LEFT + mark.node.depth * column, y: TOP + rows.at.get(id), thin: squeezed && isThin(mark) });
  }
  return { places, column, labelled, width: LEFT + depth * column + RIGHT, height: 2 * TOP + rows.height };
}

// The heights at which the steps stand, by node id, and the height of all together.
function stack(marks, children, heightOf) {
  const [root] = marks.values();
  const at = new Map(); // for now relative to the parent's subtree
  const shifts = new Map();

  // The top and bottom of a subtree at each depth, relative to where it begins.
  function place(mark) {
    const outline = { top: [], bottom: [] };
    const below = children.get(mark.node.id);
    for (const child of below) {
      const its = place(child);
      let shift = 0;
      for (let d = child.node.depth; d < its.top.length; d++) {
        if (outline.bottom[d] !== undefined) shift = Math.max(shift, outline.bottom[d] - its.top[d]);
      }
      shifts.set(child.node.id, shift);
      for (let d = child.node.depth; d < its.top.length; d++) {
        outline.top[d] ??= its.top[d] + shift;
        outline.bottom[d] = its.bottom[d] + shift;
      }
    }
    const leading = below.filter((child) => child.leads);
    const ends = [leading[0] ?? below[0], leading.at(-1) ?? below.at(-1)];
    const heights = ends.map((child) => (child ? shifts.get(child.node.id) + at.get(child.node.id) : 0));
    const [height, depth] = [heightOf(mark), mark.node.depth];
    const middle = (heights[0] + heights[1]) / 2;
    at.set(mark.node.id, middle);
    outline.top[depth] = middle - height / 2;
    outline.bottom[depth] = middle + height / 2;
    return outline;
  }

  const whole = place(root);
  const top = Math.min(...whole.top.filter((y) => y !== undefined));
  const bottom = Math.max(...whole.bottom.filter((y) => y !== undefined));
  shifts.set(root.node.id, -top);
  for (const [id, { node }] of marks) {
    if (node.parent) shifts.set(id, shifts.get(id) + shifts.get(node.parent.id));
  }
  for (const [id, y] of at) at.set(id, y + shifts.get(id));
  return { at, height: bottom - top };
}

function byPath(one, other) {
  return one.record.path.at(-1) - other.record.path.at(-1);
}
