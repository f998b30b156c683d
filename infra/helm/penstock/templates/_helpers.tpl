{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* What all pods of the release have in common. Pods of jobs have other labels. */ -}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* (dict "root" $ "of" VALUES): VALUES have a repository and a digest. */ -}}
{{- define "penstock.imageOf" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .of.repository }}
{{- if .of.digest }}@{{ .of.digest }}{{ else }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "penstock.image" -}}
{{ include "penstock.imageOf" (dict "root" . "of" .Values.image) }}
{{- end }}

{{- define "penstock.gateway" -}}
{{ ternary "https" "http" (not (empty .Values.gateway.tls.existingSecret)) }}://penstock-gateway:8742
{{- end }}

{{- /* Labels and annotations of a pod: (dict "root" $ "component" NAME). */ -}}
{{- define "penstock.podMetadata" -}}
labels:
  {{- include "penstock.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What holds of every pod: its rights, and where it may run. */ -}}
{{- define "penstock.podSpec" -}}
enableServiceLinks: false  # PENSTOCK_GATEWAY_PORT and the like would be read as settings
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532  # reads the mounted secrets
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* What holds of every container. */ -}}
{{- define "penstock.container" -}}
image: {{ include "penstock.image" . }}
{{ include "penstock.hardened" . }}
{{- end }}

{{- define "penstock.hardened" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.tmp" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}

{{- /* One Deployment: (dict "root" $ "name" SERVICE "values" VALUES), and what the service adds: "args", "env" (name
and text), "keys" (of the Secret `keys`), "certificate" (a Secret), "more" (of the container), "replicas", "spread". */ -}}
{{- define "penstock.deployment" -}}
{{- $values := .root.Values -}}
{{- $database := ne .name "node-reporter" -}}  {{- /* whether the service has a role in Postgres */ -}}
{{- $kafka := $values.kafka.existingSecret -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: penstock-{{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  replicas: {{ .replicas | default 1 }}
  {{- if ne .name "gateway" }}
  strategy: {type: Recreate}  # one at a time: the next one begins where the log says that this one ended
  {{- end }}
  selector:
    matchLabels:
      {{- include "penstock.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  template:
    metadata:
      {{- include "penstock.podMetadata" (dict "root" .root "component" .name) | nindent 6 }}
    spec:
      {{- include "penstock.podSpec" .root | nindent 6 }}
      {{- if eq .name "node-reporter" }}
      serviceAccountName: penstock-node-reporter
      automountServiceAccountToken: true
      {{- else }}
      serviceAccountName: penstock-services
      automountServiceAccountToken: false
      {{- end }}
      {{- with .spread }}
      topologySpreadConstraints:
        {{- range . }}
        - {{- toYaml . | nindent 10 }}
          labelSelector:
            matchLabels:
              {{- include "penstock.selector" $.root | nindent 14 }}
              app.kubernetes.io/component: {{ $.name }}
        {{- end }}
      {{- end }}
      containers:
        - name: {{ .name }}
          image: {{ include "penstock.imageOf" (dict "root" .root "of" (.image | default .root.Values.image)) }}
          {{- include "penstock.hardened" .root | nindent 10 }}
          command: [penstock-{{ .name }}]
          {{- with .args }}
          args:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          env:
            {{- if or $kafka (not $database) }}
            - {name: PENSTOCK_LOG_FILE, value: /etc/penstock/secrets/log-url}
            {{- end }}
            {{- if $database }}
            - {name: PENSTOCK_DSN_FILE, value: /etc/penstock/secrets/dsn}
            {{- end }}
            {{- with $values.settings }}
            - {name: PENSTOCK_CELL, value: {{ .cell | quote }}}
            - {name: PENSTOCK_CELL_INDEX, value: {{ .cellIndex | quote }}}
            - {name: PENSTOCK_TRACE_RATIO, value: {{ .traceRatio | quote }}}
            - {name: PENSTOCK_LOG_LEVEL, value: {{ .logLevel | quote }}}
            {{- if .otlp }}
            - {name: PENSTOCK_OTLP, value: {{ .otlp | quote }}}
            {{- end }}
            {{- end }}
            {{- if ne .name "gateway" }}
            - {name: PENSTOCK_HEALTH, value: /tmp/health}
            {{- end }}
            {{- range $name, $value := .env }}
            - {name: {{ $name }}, value: {{ $value | quote }}}
            {{- end }}
            {{- with concat $values.extraEnv .values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- if ne .name "gateway" }}
          # And no other probe: a service that cannot work ends, and a service that waits for its log is well.
          readinessProbe:
            exec: {command: [/opt/penstock/bin/python, -S, -E, /opt/penstock/share/health.py]}
            periodSeconds: 10
            timeoutSeconds: 5
          {{- end }}
          {{- with .more }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: secrets, mountPath: /etc/penstock/secrets, readOnly: true}
            {{- with $values.ca.existingConfigMap }}
            - {name: ca, mountPath: /etc/penstock/ca, readOnly: true}
            {{- end }}
      volumes:
        {{- include "penstock.tmp" .root | nindent 8 }}
        - name: secrets
          projected:
            defaultMode: 0400
            sources:
              {{- if $kafka }}
              - secret:
                  name: {{ $kafka }}
                  items:
                    - {key: {{ $values.kafka.sharedKey | default (printf "%s.url" .name) }}, path: log-url}
              {{- else if not $database }}
              - secret:
                  name: {{ $values.postgres.existingSecret }}
                  items:
                    - {key: {{ $values.postgres.sharedKey | default "node-reporter.url" }}, path: log-url}
              {{- end }}
              {{- if $database }}
              - secret:
                  name: {{ $values.postgres.existingSecret }}
                  items:
                    - {key: {{ $values.postgres.sharedKey | default (printf "%s.url" .name) }}, path: dsn}
              {{- end }}
              {{- with .keys }}
              - secret:
                  name: {{ $values.keys.existingSecret }}
                  items:
                    {{- range . }}
                    - {key: {{ . }}, path: {{ . }}}
                    {{- end }}
              {{- end }}
              {{- with .certificate }}
              - secret:
                  name: {{ . }}
                  items:
                    - {key: tls.crt, path: tls.crt}
                    - {key: tls.key, path: tls.key}
              {{- end }}
        {{- with $values.ca.existingConfigMap }}
        - name: ca
          configMap: {name: {{ . }}}
        {{- end }}
{{- end }}

{{- /* A file of `files`, which is written for the namespace `penstock`: (dict "root" $ "file" NAME). */ -}}
{{- define "penstock.file" -}}
{{- $text := .root.Files.Get (printf "files/%s" .file) -}}
{{- $text = regexReplaceAll "namespace: penstock\\b" $text (printf "namespace: %s" .root.Release.Namespace) -}}
{{- $text = replace "serviceaccount:penstock:" (printf "serviceaccount:%s:" .root.Release.Namespace) $text -}}
{{- replace "nvidia.com/gpu" .root.Values.nodeReporter.gpuResource $text -}}
{{- end }}

{{- /* Port of a URL. */ -}}
{{- define "penstock.portOf" -}}
{{- $url := urlParse . -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end }}
