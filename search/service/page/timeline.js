// The slider below the trees: its stops are the moments at which something happened in one of the searches.

const FASTEST = 80; // milliseconds between stops
const SLOWEST = 650;
const WHOLE = 9000; // that a replay takes, within these limits

export class Timeline {
  // `onMove` is called with the index of the frame to show of each search.
  constructor(section, onMove) {
    this.section = section;
    this.slider = section.querySelector("#slider");
    this.button = section.querySelector("#play");
    this.moment = section.querySelector("#moment");
    this.onMove = onMove;
    this.searches = [];
    this.stops = [];
    this.timer = null;
    this.slider.addEventListener("input", () => {
      this.pause();
      this.#move();
    });
    this.button.addEventListener("click", () => this.toggle());
    document.addEventListener("keydown", (event) => this.#press(event));
    this.#markPlaying();
  }

  get seconds() {
    return this.stops.at(-1) ?? 0;
  }

  get atEnd() {
    return Number(this.slider.value) >= this.stops.length - 1;
  }

  // Takes in searches that may have grown; a slider at the end stays there.
  update(searches) {
    const follow = this.atEnd || searches !== this.searches;
    this.searches = searches;
    this.stops = stopsOf(searches);
    this.slider.max = Math.max(this.stops.length - 1, 0);
    if (follow) this.slider.value = this.slider.max;
    this.section.hidden = this.stops.length === 0;
    this.#move();
  }

  toggle() {
    if (this.timer !== null) this.pause();
    else this.play();
  }

  play() {
    if (this.atEnd) this.#goTo(0);
    const pace = Math.min(Math.max(WHOLE / this.stops.length, FASTEST), SLOWEST);
    this.timer = setInterval(() => {
      this.#goTo(Number(this.slider.value) + 1);
      if (this.atEnd) this.pause();
    }, pace);
    this.#markPlaying();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.#markPlaying();
  }

  #goTo(stop) {
    this.slider.value = stop;
    this.#move();
  }

  #move() {
    const stop = Number(this.slider.value);
    const at = this.searches.length > 1 ? this.stops[stop] : null;
    const frames = this.searches.map((search) => (at === null ? stop : frameAt(search, at)));
    const names = this.searches.map((search, i) => nameOf(search, frames[i]));
    const seconds = this.stops.length ? `${this.stops[stop].toFixed(2)} s` : "";
    this.moment.textContent = [[...new Set(names)].join(" | "), seconds].join(" · ");
    this.slider.setAttribute("aria-valuetext", this.moment.textContent);
    this.onMove(frames);
  }

  #markPlaying() {
    const playing = this.timer !== null;
    this.button.classList.toggle("playing", playing);
    this.button.setAttribute("aria-label", playing ? "Pause" : "Play");
  }

  #press(event) {
    if (event.key !== " " || this.section.hidden || event.target.closest("input, textarea, select, button, summary, a")) {
      return;
    }
    event.preventDefault();
    this.toggle();
  }
}

// One search stops at each of its frames; several at each moment at which one of them does.
function stopsOf(searches) {
  if (searches.length === 1) return searches[0].frames.map((frame) => frame.seconds);
  const seconds = searches.flatMap((search) => search.frames.map((frame) => frame.seconds));
  return [...new Set(seconds)].sort((one, other) => one - other);
}

function frameAt(search, seconds) {
  return Math.max(search.frames.findLastIndex((frame) => frame.seconds <= seconds), 0);
}

function nameOf(search, index) {
  const frame = search.frames[index];
  if (!frame) return "waiting";
  const rounds = search.frames.at(-1).round || search.frames.at(-2)?.round;
  return frame.round && search.ended ? `${frame.name} of ${rounds}` : frame.name;
}
