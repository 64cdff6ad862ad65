// Formulas: LaTeX as models write it to MathML, which browsers draw themselves.
//
// A part of LaTeX is read, that of answers to problems. What is unknown makes a formula none: its source is shown.

import { answerText } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";

// Operators and letters by command; those of one kind as pairs of words.
const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));
const LETTERS = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν
  xi=ξ pi=π rho=ρ sigma=σ tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π
  Sigma=Σ Phi=Φ Psi=Ψ Omega=Ω infty=∞ ell=ℓ hbar=ℏ emptyset=∅ varnothing=∅ partial=∂ nabla=∇ degree=° prime=′ Re=ℜ Im=ℑ`);
const OPERATORS = pairs(`
  cdot=⋅ times=× div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=• le=≤ leq=≤ leqslant=≤ ge=≥ geq=≥ geqslant=≥ ne=≠ neq=≠
  lt=< gt=> ll=≪ gg=≫ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ to=→ rightarrow=→ leftarrow=← leftrightarrow=↔
  longrightarrow=⟶ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ Longrightarrow=⟹ iff=⟺ mapsto=↦ in=∈ notin=∉ ni=∋
  cup=∪ cap=∩ setminus=∖ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ forall=∀ exists=∃ neg=¬ land=∧ wedge=∧ lor=∨ vee=∨
  therefore=∴ because=∵ angle=∠ triangle=△ square=□ parallel=∥ perp=⟂ mid=∣ nmid=∤ oplus=⊕ otimes=⊗ ldots=… dots=… cdots=⋯
  vdots=⋮ ddots=⋱ colon=: checkmark=✓ surd=√ backslash=\\ %=% $=$ #=# &=& _=_`);
const FENCES = pairs(`
  {={ }=} lbrace={ rbrace=} lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ vert=| lvert=| rvert=| |=‖ Vert=‖ lVert=‖ rVert=‖
  lbrack=[ rbrack=]`);
const LARGE = pairs("sum=∑ prod=∏ int=∫ iint=∬ oint=∮ bigcup=⋃ bigcap=⋂");
const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker gcd lcm deg arg Pr mod".split(" "),
);
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" ")); // what stands below them is written below
const SPACES = { ",": ".17em", ":": ".22em", ">": ".22em", ";": ".28em", " ": ".28em", "!": "0", quad: "1em", qquad: "2em", enspace: ".5em", thinspace: ".17em" };
const ACCENTS = { bar: "¯", overline: "¯", hat: "^", widehat: "^", tilde: "~", widetilde: "~", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨" };
const TEXTS = new Set("text textbf textit textrm texttt mbox mathrm mathbf mathit mathsf mathtt operatorname boldsymbol bm mathcal".split(" "));
const DOUBLE = pairs("R=ℝ N=ℕ Z=ℤ Q=ℚ C=ℂ P=ℙ E=𝔼");
const SIZES = /^(?:big|Big|bigg|Bigg)[lrm]?$/;
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "hline", "nonumber", "notag", "allowbreak"]);
const TABLES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{", matrix: "", smallmatrix: "", array: "", aligned: "", align: "", gathered: "", gather: "", split: "", equation: "" };
const DEEPEST = 64;
const LONGEST = 20000; // characters of a text that is searched for formulas

// Where text holds formulas: \[…\], \(…\), $$…$$, $…$ that is no price, an environment, or a box by itself.
const FORMULA =
  /\\\[([^]+?)\\\]|\\\(([^]+?)\\\)|\$\$([^]+?)\$\$|(?<![\\$\w])\$(?=[^\s$])((?:[^$\\\n]|\\[^])+?)(?<!\s)\$(?![\d$])|(\\begin\{(?:align|equation|gather|cases|[pbvBV]?matrix)\*?\}[^]+?\\end\{(?:align|equation|gather|cases|[pbvBV]?matrix)\*?\})|(\\boxed\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\})/g;

// The text's parts, with its formulas as MathML elements: text and elements to append.
export function withFormulas(text) {
  if (text.length > LONGEST) return [text];
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(FORMULA)) {
    const [source, display, inline, dollars, dollar, environment, box] = found;
    const drawn = formula(display ?? inline ?? dollars ?? dollar ?? environment ?? box, !(inline ?? dollar ?? box));
    if (!drawn) continue;
    parts.push(text.slice(end, found.index), drawn);
    end = found.index + source.length;
  }
  return [...parts, text.slice(end)].filter((part) => part !== "");
}

// An answer: a formula if it is written as one.
export function answerParts(answer) {
  const text = answerText(answer);
  return [(text === answer && /[\\^]/.test(text) && text.length < LONGEST && formula(text, false)) || text];
}

// LaTeX as a <math> element; null if there is something in it that is not known.
export function formula(source, display) {
  try {
    const reader = new Reader(source);
    const body = reader.row();
    if (reader.at < reader.tokens.length) return null;
    const drawn = element("math", {}, body);
    if (display) drawn.setAttribute("display", "block");
    drawn.setAttribute("title", source.trim());
    return drawn;
  } catch (error) {
    if (error instanceof UnknownError) return null;
    throw error;
  }
}

class UnknownError extends Error {}

function element(tag, attributes, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const operator = (text, attributes = {}) => element("mo", attributes, text);
const fence = (text) => operator(text, { stretchy: "true" });

class Reader {
  constructor(source) {
    this.tokens = source.match(/\\(?:[a-zA-Z]+\*?|[^])|\d+(?:[.,]\d+)*|\s+|[^]/g) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  blanks() {
    while (this.next !== undefined && /^\s/.test(this.next)) this.at++;
  }

  // Everything up to what closes it, which is left: }, ], &, \\, \right, \end or the end.
  row(closing = []) {
    if (++this.depth > DEEPEST) throw new UnknownError();
    const children = [];
    for (this.blanks(); this.next !== undefined; this.blanks()) {
      if (["}", "&", "\\\\", "\\right", "\\end", ...closing].includes(this.next)) break;
      const base = this.atom();
      children.push(...this.scripts(base));
    }
    this.depth--;
    return children.length === 1 ? children[0] : element("mrow", {}, ...children);
  }

  // A base with what is raised and lowered at it.
  scripts(base) {
    let [below, above] = [null, null];
    for (this.blanks(); ["^", "_", "'"].includes(this.next); this.blanks()) {
      const sign = this.tokens[this.at++];
      const script = sign === "'" ? operator("′") : this.argument();
      if (sign === "_") below = below ? element("mrow", {}, below, script) : script;
      else above = above ? element("mrow", {}, above, script) : script;
    }
    if (!below && !above) return base ? [base] : [];
    base ??= element("mrow", {});
    const name = base.localName === "mo" && base.getAttribute("movablelimits") ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return [element(name[2], {}, base, below, above)];
    return [below ? element(name[0], {}, base, below) : element(name[1], {}, base, above)];
  }

  // A group in braces, or one atom; of a number, as LaTeX has it, its first digit.
  argument() {
    this.blanks();
    if (this.next === undefined) throw new UnknownError();
    if (/^\d./.test(this.next)) this.tokens.splice(this.at, 1, this.next[0], this.next.slice(1));
    if (this.next !== "{") return this.atom() ?? element("mrow", {});
    this.at++;
    const row = this.row();
    this.expect("}");
    return row;
  }

  expect(token) {
    this.blanks();
    if (this.tokens[this.at++] !== token) throw new UnknownError();
  }

  // The letters of a group, as they are.
  letters() {
    this.expect("{");
    let text = "";
    for (let open = 1; ; this.at++) {
      const token = this.next;
      if (token === undefined) throw new UnknownError();
      open += (token === "{") - (token === "}");
      if (!open) break;
      text += token === "{" || token === "}" ? "" : token.replace(/^\\(?=[^a-zA-Z])/, "");
    }
    this.at++;
    if (text.includes("\\")) throw new UnknownError();
    return text;
  }

  // One element; null for what leaves nothing, such as a size.
  atom() {
    const token = this.tokens[this.at++];
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1).replace(/(?<=.)\*$/, ""));
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (/^\d/.test(token)) return element("mn", {}, token);
    if (/^\p{L}/u.test(token)) return element("mi", {}, token);
    if (token === "~") return element("mspace", { width: ".28em" });
    if (["^", "_", "'"].includes(token)) {
      this.at--;
      return null;
    }
    if ("()[]|".includes(token)) return operator(token, { stretchy: "false" });
    if (["}", "&", "\\", "#", "$", "%"].includes(token)) throw new UnknownError();
    return operator(token === "-" ? "−" : token);
  }

  command(name) {
    if (name in LETTERS) return element("mi", {}, LETTERS[name]);
    if (name in OPERATORS) return operator(OPERATORS[name]);
    if (name in FENCES) return operator(FENCES[name], { stretchy: "false" });
    if (name in LARGE) return operator(LARGE[name], name.includes("int") ? {} : { movablelimits: "true" });
    if (FUNCTIONS.has(name)) return element("mi", { mathvariant: "normal" }, name);
    if (LIMITS.has(name)) return operator(name, { movablelimits: "true", lspace: "0", rspace: ".17em" });
    if (name in SPACES) return element("mspace", { width: SPACES[name] });
    if (name in ACCENTS) return element("mover", { accent: "true" }, this.argument(), operator(ACCENTS[name], { stretchy: "true" }));
    if (TEXTS.has(name)) return this.text(name);
    if (SIZES.test(name) || IGNORED.has(name)) return null;
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return element("mfrac", {}, this.argument(), this.argument());
      case "binom": case "dbinom": {
        const parts = element("mfrac", { linethickness: "0" }, this.argument(), this.argument());
        return element("mrow", {}, fence("("), parts, fence(")"));
      }
      case "sqrt": return this.root();
      case "boxed": case "fbox": return element("mrow", { class: "boxed" }, this.argument());
      case "underline": return element("munder", {}, this.argument(), operator("_", { stretchy: "true" }));
      case "left": return this.fenced();
      case "mathbb": {
        const letter = this.letters();
        if (!(letter in DOUBLE)) throw new UnknownError();
        return element("mi", {}, DOUBLE[letter]);
      }
      case "pmod": return element("mrow", {}, operator("("), element("mi", {}, "mod"), element("mspace", { width: ".28em" }), this.argument(), operator(")"));
      case "bmod": return operator("mod");
      case "begin": return this.table();
      default: throw new UnknownError();
    }
  }

  text(name) {
    const text = this.letters().replace(/^\s|\s$/g, "\u00a0");
    const weight = name.includes("bf") || name.startsWith("bo") || name === "bm" ? { class: "bold" } : {};
    return name === "operatorname" ? element("mi", { mathvariant: "normal" }, text) : element("mtext", weight, text);
  }

  root() {
    this.blanks();
    if (this.next !== "[") return element("msqrt", {}, this.argument());
    this.at++;
    const index = this.row(["]"]);
    this.expect("]");
    return element("mroot", {}, this.argument(), index);
  }

  // \left( … \right)
  fenced() {
    const open = this.delimiter();
    const inside = this.row();
    this.expect("\\right");
    const close = this.delimiter();
    return element("mrow", {}, ...(open ? [fence(open)] : []), inside, ...(close ? [fence(close)] : []));
  }

  delimiter() {
    this.blanks();
    const token = this.tokens[this.at++] ?? "";
    if (token === ".") return "";
    if (/^[()[\]|/<>]$/.test(token)) return token;
    const known = FENCES[token.slice(1)];
    if (token[0] !== "\\" || !known) throw new UnknownError();
    return known;
  }

  // \begin{…} rows of cells \end{…}
  table() {
    const given = this.letters();
    const name = given.replace(/\*$/, "");
    if (!(name in TABLES)) throw new UnknownError();
    if (name === "array") this.letters();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(element("mtd", {}, this.row()));
      const token = this.tokens[this.at++];
      if (token === "\\\\") rows.push([]);
      else if (token === "\\end") break;
      else if (token !== "&") throw new UnknownError();
    }
    if (this.letters() !== given) throw new UnknownError();
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].textContent) rows.pop();
    const kind = TABLES[name] ? name : /^(?:align|split)/.test(name) ? "aligned" : name;
    const table = element("mtable", { class: kind }, ...rows.map((cells) => element("mtr", {}, ...cells)));
    const [open = "", close = ""] = TABLES[name];
    return element("mrow", {}, ...(open ? [fence(open)] : []), table, ...(close ? [fence(close)] : []));
  }
}
