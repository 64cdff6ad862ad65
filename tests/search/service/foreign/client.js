// A client of @grpc/grpc-js, made from the contract alone: node client.js SETTINGS, as JSON. Prints one line of JSON.
//
// SETTINGS: address, proto, ca, token, problem, and how: "unary", "patience" (the same with a minute's deadline),
// "deadline" (with a short one), "stream", "cancel", or "session" (of scores).
"use strict";

const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const settings = JSON.parse(process.argv[2]);
const contract = loader.loadSync(settings.proto, { keepCase: true, enums: String, oneofs: true, longs: Number });
const { SearchService } = grpc.loadPackageDefinition(contract).espalier.v1;
const login = grpc.credentials.createFromMetadataGenerator((_, done) => {
  const metadata = new grpc.Metadata();
  metadata.set("authorization", `Bearer ${settings.token}`);
  done(null, metadata);
});
const credentials = grpc.credentials.combineChannelCredentials(
  grpc.credentials.createSsl(fs.readFileSync(settings.ca)),
  login,
);
const client = new SearchService(settings.address, credentials, {
  "grpc.keepalive_time_ms": 5000,
  "grpc.keepalive_timeout_ms": 5000,
  "grpc.keepalive_permit_without_calls": 1,
});

function print(value) {
  process.stdout.write(JSON.stringify(value) + "\n");
  client.close();
}

function failure(error) {
  const details = error.metadata.get("grpc-status-details-bin").length;
  return { code: grpc.status[error.code], text: error.details, details };
}

function solve(deadline) {
  client.SolveProblem({ problem: settings.problem }, { deadline }, (error, response) =>
    print(error ? failure(error) : { answer: response.result.answer, reason: response.result.stop_reason }),
  );
}

function follow() {
  const events = [];
  const call = client.SolveProblemStream({ request: { problem: settings.problem } });
  call.on("data", (response) => {
    events.push(response.event);
    if (settings.how === "cancel") call.cancel();
  });
  call.on("error", (error) => print({ events, ...failure(error) }));
  call.on("end", () => settings.how === "stream" && print({ events }));
}

// Two first steps, one below the first of them once that is scored, and the end.
function session() {
  const scores = [];
  const call = client.ScoreSteps();
  call.on("data", (response) => {
    if (response.event === "result") {
      print({ scores, reason: response.result.stop_reason, nodes: response.result.usage.nodes });
      return;
    }
    for (const { node, score } of response.scored.scores) scores.push({ node, score });
    if (scores.length === 2) {
      call.write({ steps: [{ node: 3, parent: 1, text: "85-12=73" }], release: [2] });
      call.end();
    }
  });
  call.on("error", (error) => print({ scores, ...failure(error) }));
  const steps = [
    { node: 1, parent: 0, text: "38+47=85" },
    { node: 2, parent: 0, text: "38+47=75" },
  ];
  call.write({ open: { problem: settings.problem, max_nodes: 8, max_tokens: 256 }, steps });
}

const after = (milliseconds) => new Date(Date.now() + milliseconds);
if (settings.how === "unary") solve(after(10_000));
else if (settings.how === "deadline") solve(after(300));
else if (settings.how === "patience") solve(after(60_000));
else if (settings.how === "session") session();
else follow();
